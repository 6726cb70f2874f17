"""Tasks in Harbor's format run in the sandbox: their own tests reward them, and what needs an image is refused by name."""

import asyncio
import platform
import random

import pytest

from etude.environments import EnvironmentSession
from etude.environments.loader import load_environments
from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.options import EnvironmentOptions
from etude.testing.environment_check import check_environment

TEST = """#!/bin/bash
if [ "$(cat /app/sum.txt)" = 55 ]; then
  echo "{\\"reward\\": 1.0, \\"limit\\": $LIMIT}" > /logs/verifier/reward.json
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
PYTEST = """#!/bin/bash
apt-get update && apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh
source "$HOME/.local/bin/env"
if uvx --with pytest==8.4.1 \\
  --with pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
DOCKERFILE = "FROM ubuntu:24.04\n# Files.\nWORKDIR /app\nCOPY data/ /app/\nENV LIMIT=3\n"
SETTINGS = 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 30.0\n[agent]\ntimeout_sec = 30.0\n[environment]\n'


@pytest.fixture
def write(tmp_path):
    """Writes a task into the folder of tasks; returns that."""

    def write(name="sums", test=TEST, docker=DOCKERFILE, settings=SETTINGS, **more):
        files = {
            "instruction.md": "Write the sum of the numbers in numbers.txt to /app/sum.txt.\n",
            "task.toml": settings,
            "environment/Dockerfile": docker,
            "environment/data/numbers.txt": "".join(f"{number}\n" for number in range(11)),
            "solution/solve.sh": "awk '{s+=$1} END {print s}' numbers.txt > sum.txt\n",
            "tests/test.sh": test,
            "tests/test_outputs.py": "def test_outputs():\n    assert open('/app/sum.txt').read() == '55\\n'\n",
        }
        for path, text in (files | more).items():
            file = tmp_path / "tasks" / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "tasks"

    return write


def play(folder, *commands, name="sums"):
    """What the commands printed, and the score."""

    async def main():
        [entry] = load_environments([EnvironmentOptions(id=f"harbor:{folder}")]).entries.values()
        row = {"extra_info": {"task": {"task": str(folder / name)}}, "group_seed": 0, "request_id": "r"}
        async with EnvironmentSession(entry, row) as session:
            shown = [(await session.call_tool("bash", {"command": command}))[0].text for command in commands]
            return shown, await session.score(completed=True)

    return asyncio.run(main())


@pytest.mark.slow
def test_tasks_conform_and_their_solution_earns_1(write):
    found = check_environment(EnvironmentOptions(id=f"harbor:{write()}"))
    assert [each for each in found.all if each.level.value != "ok"] == []
    assert any(each.subject == "own answer" and each.message == "earns 1" for each in found.all)


def test_changed_tests_are_another_version(write):
    versions = set()
    for test in (TEST, TEST, f"{TEST}# more\n"):
        [entry] = load_environments([EnvironmentOptions(id=f"harbor:{write(test=test)}")]).entries.values()
        versions.add(entry.version)
    assert len(versions) == 2


def test_commands_share_files_and_the_tests_reward_them(write):
    folder = write()
    shown, (score, info) = play(folder, "ls; echo $LIMIT; false", "echo $((5 * 11)) > sum.txt")
    assert shown == ["numbers.txt\n3\n\n[exit code 1]", ""]
    assert (score, info) == (1.0, {"limit": 3.0})
    assert play(folder, "echo 54 > sum.txt")[1] == (0.0, {})
    assert play(folder)[1] == (0.0, {})


def test_a_script_that_installs_pytest_runs_it(write):
    assert play(write(test=PYTEST), "echo 55 > sum.txt")[1] == (1.0, {})


def test_what_the_model_left_running_or_wrote_for_the_tests_earns_nothing(write):
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; ls /tests"
    late = (
        "(while true; do mkdir -p /sandbox/logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json; done) &"
    )
    shown, (score, _) = play(write(), f"echo 'exit 0' > test.sh; {forged}", late)
    assert "No such file" in shown[0]
    assert score == 0.0


_SCRIPT = "printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt; exit 0\\n'"


_EXIT = "echo 'import os; os._exit(0)'"
_LOCAL = f"""mkdir -p ~/.local/bin; {_SCRIPT} > ~/.local/bin/python3; cp ~/.local/bin/python3 ~/.local/bin/bash
chmod +x ~/.local/bin/*; echo 'echo 1 > /logs/verifier/reward.txt; exit 0' > ~/.local/bin/env
user=$(/usr/bin/env python3 -m site --user-site); mkdir -p $user; {_EXIT} > $user/usercustomize.py"""
_WORK = f"""{_EXIT} | tee pytest.py /sandbox/conftest.py /conftest.py conftest.py
echo '[pytest]\naddopts = --collect-only' | tee /sandbox/pytest.ini /pytest.ini pytest.ini"""
_FORGED = """import builtins, binascii, io
real, builtins.open = open, lambda p, *a, **k: io.StringIO("1") if "reward" in str(p) else real(p, *a, **k)
b64decode = binascii.a2b_base64"""
_LINKS = f"""mkdir -p /sandbox/mine/verifier; {_EXIT} > /sandbox/mine/conftest.py; echo 1 > /sandbox/mine/verifier/reward.txt
ln -s mine /sandbox/tests; ln -s mine /sandbox/logs"""


@pytest.mark.parametrize(("test", "forged"), [(PYTEST, _LOCAL), (TEST, _LOCAL), (PYTEST, _WORK), (PYTEST, _LINKS)])
def test_what_the_model_put_where_the_tests_look_earns_nothing(write, test, forged):
    assert play(write(test=test), f"{forged}; true")[1][0] == 0.0


def test_a_module_that_the_model_left_is_not_imported_by_what_reads_the_reward(write):
    assert play(write(), f"echo '{_FORGED}' | tee /sandbox/base64.py > base64.py")[1] == (0.0, {})


_MEMORY = """cat > /tmp/x.py <<'E'
import ctypes
def base(pid):
    return next(int(l.split("-")[0], 16) for l in open(f"/proc/{pid}/maps") if "libc.so" in l and " 00000000 " in l)
where = ctypes.cast(ctypes.CDLL(None).kill, ctypes.c_void_p).value - base("self") + base(2)
with open("/proc/2/mem", "r+b", 0) as memory:
    memory.seek(where)
    memory.write(b"\\x31\\xc0\\xc3")  # kill() does nothing and returns 0
E
python3 /tmp/x.py
exec < /dev/null > /dev/null 2>&1
setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; done' &"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is that of x86-64")
def test_the_memory_of_the_process_that_reads_the_reward_is_out_of_reach(write):
    test = TEST.replace("reward.txt", "reward.json").replace("echo 0", "sleep 0.2; echo 0")
    shown, (score, _) = play(write(test=test), _MEMORY)
    assert "Permission denied: '/proc/2/maps'" in shown[0]
    assert score == 0.0


@pytest.mark.parametrize("broken", ["kill -9 $PPID", "chmod 000 /sandbox", "rm -r /sandbox/app"])
def test_a_sandbox_that_the_models_code_ended_or_spoiled_is_worth_0(write, broken):
    assert play(write(), broken)[1] == (0.0, {"sandbox_lost": 1})


def test_a_sandbox_that_ends_under_a_cell_of_ours_is_worth_0(write):
    large = random.Random(0).randbytes(8 << 20).hex()
    folder = write(settings=SETTINGS + "memory_mb = 48\n", **{"tests/data.bin": large})
    assert play(folder, "true")[1] == (0.0, {"sandbox_lost": 1})


def test_a_sandbox_that_fails_before_the_model_acted_is_infrastructure(write):
    folder = write(settings=SETTINGS + "storage_mb = 1\n", **{"tests/data.bin": "x" * (3 << 20)})
    with pytest.raises(InfrastructureError, match="No space left"):
        play(folder)


@pytest.mark.parametrize("command", ["echo " + "a" * 200_000, "echo \0", "echo \ud800", "kill -INT $PPID; sleep 1"])
def test_a_command_that_cannot_be_run_is_told_to_the_model(write, command):
    with pytest.raises(ToolError, match=r"^The command was not run: \w+"):
        play(write(), command)


RUNS = """#!/bin/bash
cd /tests
if [ "$(python3 /app/prog.py)" = 42 ]; then echo 1 > /logs/verifier/reward.txt; else echo -1 > /logs/verifier/reward.txt; fi
"""
SHORT = SETTINGS.replace("timeout_sec = 30.0", "timeout_sec = 4.0", 1)
_BREAKS = {
    "kills all": "import os; os.kill(-1, 9)",
    "takes the folder away": "import os; os.rename('/sandbox/logs/verifier', '/sandbox/logs/other')",
    "leaves a folder there": "import os; os.mkdir('/logs/verifier/reward.txt')",
    "writes no number": "open('/logs/verifier/reward.json', 'w').write('NaN')",
    "writes without end": "open('/logs/verifier/reward.json', 'w').write('1' * (3 << 20))",
    "never ends": "while True: pass",
}


def _leave(program):
    return f"cat > prog.py <<'E'\n{program}\nE"


@pytest.mark.parametrize("program", _BREAKS.values(), ids=_BREAKS)
def test_a_program_that_keeps_its_tests_from_a_reward_earns_no_more_than_nothing_does(write, program):
    """Such rollouts were dropped, so that a program could choose this over a low score."""
    assert play(write(test=RUNS, settings=SHORT), _leave(program))[1] == (-1.0, {"sandbox_lost": 1})


def test_a_reward_that_a_program_writes_into_the_other_file_does_not_count(write):
    forged = 'open("/logs/verifier/reward.json", "w").write(\'{"reward": 1}\')'
    assert play(write(test=RUNS), _leave(forged))[1][0] == -1.0
    assert play(write(test=RUNS), _leave(f"{forged}; print(42)"))[1][0] == 1.0


def test_the_lower_of_two_rewards_counts_with_the_others_numbers(write):
    test = (
        """echo 0.25 > /logs/verifier/reward.txt; echo '{"reward": 0.5, "parts": 3}' > /logs/verifier/reward.json\n"""
    )
    assert play(write(test=test))[1] == (0.25, {"parts": 3.0})


def test_tests_that_give_no_reward_in_an_untouched_sandbox_either_are_infrastructure(write):
    with pytest.raises(InfrastructureError, match="its tests gave no reward: finished: no service"):
        play(write(test="echo no service; exit 1\n"), "echo 55 > sum.txt")


def test_tests_that_give_a_reward_at_the_second_try_gave_it(write):
    test = f"if [ ! -e /tmp/tried ] && [ -e sum.txt ]; then touch /tmp/tried; exit 1; fi\n{TEST}"
    assert play(write(test=test), "echo 55 > sum.txt")[1] == (1.0, {"limit": 3.0})


def test_the_reward_is_the_score_whatever_else_the_tests_call_so(write):
    test = TEST.replace('\\"limit\\": $LIMIT', '\\"score\\": 55')
    assert play(write(test=test), "echo 55 > sum.txt")[1] == (1.0, {})


def test_tests_that_give_no_reward_are_infrastructure(write):
    deep = "python3 -c 'print(\"[\" * 9999)' > /logs/verifier/reward.json\n"
    for script in ("", deep):
        with pytest.raises(InfrastructureError, match="its tests gave no reward: finished: no service"):
            play(write(test=f"echo no service; {script}exit 1\n"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"docker": "FROM ubuntu:24.04\nRUN apt-get install -y nginx\n"},
            "sums needs an image: RUN apt-get install -y nginx",
        ),
        ({"docker": "FROM ghcr.io/laude/t-bench:1\n"}, "needs an image: FROM ghcr.io/laude/t-bench:1"),
        ({"docker": "FROM python:3.13\nWORKDIR /srv\n"}, "needs an image: WORKDIR /srv"),
        ({"docker": "FROM python:3.13\nCOPY ../../key /app/\n"}, "needs an image: COPY ../../key"),
        ({"docker": "FROM python:3.13\nCOPY /etc/hostname /app/\n"}, "needs an image: COPY /etc/hostname"),
        ({"docker": "FROM python:3.13\nCOPY tests ../etc\n"}, "needs an image: COPY tests"),
        ({"settings": SETTINGS + 'docker_image = "a/b"\n'}, "needs an image: environment.docker_image"),
        ({"settings": '[[steps]]\nname = "one"\n'}, "needs an image: steps"),
        ({"test": "uvx -w no-such-package-1 pytest /tests\n"}, "test.sh needs no-such-package-1"),
        ({"test": "git clone https://a.b/c\n"}, "test.sh needs git clone"),
        ({"settings": "=\n"}, "is no task of Harbor's"),
    ],
)
def test_what_needs_an_image_is_refused_by_name_or_left_out(write, changed, message):
    folder = write(**changed)
    with pytest.raises(ConfigError, match=message):
        load_environments([EnvironmentOptions(id=f"harbor:{folder}")])
    write("another")
    [entry] = load_environments([EnvironmentOptions(id=f"harbor:{folder}", args={"skip": True})]).entries.values()
    assert [task["task"] for task in entry.make().tasks("train")] == [str(folder / "another")]
