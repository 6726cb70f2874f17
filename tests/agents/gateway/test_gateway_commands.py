"""Agents that are commands: their environment, their endings, and what they leave behind."""

import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from agents_stage import call, says
from gateway_stage import PROGRAM, roll
from wait_stage import is_running, until

from etude.agents import AGENT_LOOPS, AgentLoopManager
from etude.agents.gateway import check_openai_agent
from etude.errors import ConfigError, EtudeError
from etude.options import AgentSandboxOptions, OpenAIAgentOptions
from etude.sandbox import SandboxClient, SandboxUnavailableError
from etude.sandbox.jail import hidden
from etude.trajectory import StopReason

REWARD = "open(os.environ['ETUDE_REWARD_FILE'], 'w').write('{}')\n"


def test_a_command_finds_its_policy_in_a_clean_environment(loop_of, monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    program = PROGRAM + "assert 'A_SECRET' not in os.environ\n" + REWARD.format(0.25)
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]), scored=False)
    assert result.trajectory.response_ids == says("5")
    assert result.trajectory.rewards.score == 0.25


def command(program):
    return [sys.executable, "-I", "-c", program]


@pytest.mark.slow
@pytest.mark.parametrize("printed", ["42", "nan", "1e400", "0.5\n"])
def test_nothing_that_a_command_prints_is_a_reward(loop_of, printed):
    [result], _ = roll(loop_of(command=command(PROGRAM + f"print({printed!r})")))
    assert result.trajectory.rewards.score is None  # the reward manager's is to come
    assert result.trajectory.stop_reason is StopReason.COMPLETED
    AGENT_LOOPS._items.pop("an_agent")
    [result], _ = roll(loop_of(command=command(PROGRAM + f"print({printed!r})")), scored=False)
    assert (result.dropped, result.failures, result.attempts) == (StopReason.AGENT_ERROR, 0, 1)
    assert "without a reward" in result.cause
    assert "ETUDE_REWARD_FILE" in result.cause


def as_file(text):
    return f"open(os.environ['ETUDE_REWARD_FILE'], 'wb').write({text!r})"


@pytest.mark.parametrize(
    ("written", "reward"), [(b"1", 1.0), (b" -0.5\n", -0.5), (b"1e-3", 0.001), (b"0", 0.0), (b"7\r\n", 7.0)]
)
def test_a_commands_reward_is_the_number_in_its_file(loop_of, written, reward):
    [result], _ = roll(loop_of(command=command(PROGRAM + as_file(written))), scored=False)
    assert result.trajectory.rewards.score == reward
    assert result.trajectory.stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize(
    "written",
    [b"nan", b"inf", b"1e31", b"\n", b"yes", b"1 2", b"\xff", b"1\n" + 200 * b"0", b"[1]", b"1_0", 1999 * b'{"":'],
)
def test_a_wrong_reward_file_is_an_error_of_that_rollout(loop_of, written):
    [result], _ = roll(loop_of(command=command(PROGRAM + as_file(written))), scored=False)
    assert (result.trajectory, result.dropped, result.failures) == (None, StopReason.AGENT_ERROR, 0)
    assert "ETUDE_REWARD_FILE (/" in result.cause


INTRUDER = """
import os
for folder, _, files in os.walk(os.environ["TMPDIR"]):
    for file in files:
        open(os.path.join(folder, file), "w").write("99")
for number in range(3, 1000):
    try:
        open(f"/dev/fd/{number}", "w").write("99")
    except OSError:
        pass
"""


def test_what_a_model_wrote_finds_no_reward_file(loop_of, tmp_path, monkeypatch):
    """It searches what its user can read, `/proc` of other programs aside; every rollout runs one, while all others run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    intrude = f"import subprocess; subprocess.run([sys.executable, '-c', {INTRUDER!r}], check=True)\n"
    program = PROGRAM + REWARD.format(0.5) + "import time; time.sleep(1)\n" + intrude
    results, _ = roll(loop_of(command=command(program)), rows=3, scored=False)
    assert [result.trajectory.rewards.score for result in results] == [0.5] * 3
    assert not list(tmp_path.iterdir())


def test_a_command_that_fails_keeps_what_it_wrote(loop_of):
    [result], _ = roll(loop_of(command=command(PROGRAM + REWARD.format(0.5) + "sys.exit(3)")), scored=False)
    assert result.trajectory.rewards.score == 0.5
    assert result.trajectory.stop_reason is StopReason.AGENT_ERROR
    assert result.trajectory.response_ids == says("5")


def test_a_command_that_fails_without_a_reward_is_dropped(loop_of):
    fails = "import sys; print('oh  no', file=sys.stderr); sys.exit(3)"
    [result], _ = roll(loop_of(command=command(fails)))
    assert (result.trajectory, result.dropped) == (None, StopReason.AGENT_ERROR)
    assert "ended with status 3: oh no" in result.cause


POST = """
import os, urllib.error, urllib.request
where = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward"
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
try:
    urllib.request.urlopen(urllib.request.Request(where, b'{"reward": 1000}', key))
except urllib.error.HTTPError as error:
    assert error.code == 403
"""


@pytest.mark.slow
def test_a_verifier_alone_judges_what_the_agent_left_in_a_copy_of_the_workspace(loop_of, tmp_path):
    (tmp_path / "start.txt").write_text("1")
    program = PROGRAM + "assert 'ETUDE_REWARD_FILE' not in os.environ\nopen('start.txt', 'a').write('2')\nsys.exit(3)"
    reads = "assert 'OPENAI_API_KEY' not in os.environ\n" + REWARD.format("' + open('start.txt').read() + '")
    given = {"command": command(program), "workspace": str(tmp_path)}
    results, _ = roll(loop_of(**given, verifier=command("import os\n" + reads)), rows=2, scored=False)
    assert [result.trajectory.rewards.score for result in results] == [12.0] * 2  # each its own copy
    assert (tmp_path / "start.txt").read_text() == "1"
    AGENT_LOOPS._items.pop("an_agent")
    [result], _ = roll(loop_of(**given | {"command": command(PROGRAM + POST)}, verifier=command("import os\n" + reads)))
    assert (result.trajectory.rewards.steps, result.trajectory.rewards.score) == (
        [],
        1.0,
    )  # what the model's code posts
    for broken, why in (("raise SystemExit(2)", "ended with status 2"), ("pass", "wrote no reward")):
        AGENT_LOOPS._items.pop("an_agent")
        [result], _ = roll(loop_of(**given, verifier=command(broken)), scored=False)
        assert (result.dropped, why in result.cause) == (StopReason.INFRASTRUCTURE, True)


LEFT = {  # by an agent, and what its verifier, which reads all as UTF-8, does with it: fail, or judge the rest
    "bytes": ("open('more', 'wb').write(bytes([255, 128]))", "fails"),
    "no answer": ("os.remove('answer')", "fails"),
    "a folder for an answer": ("os.remove('answer'); os.mkdir('answer')", "fails"),
    "no number": ("open('answer', 'w').write('nan')", "fails"),
    "no folder": ("import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True)", "fails"),
    "endless": ("open('answer', 'w').write('sleep')", "fails"),
    "a pipe": ("os.mkfifo('more')", "judges"),
    "a device's link": ("os.symlink('/dev/zero', 'more')", "judges"),
    "without permission": (
        "os.mkdir('no'); open('no/x', 'w').write('1'); os.chmod('no', 0); os.chmod('.', 0)",
        "judges",
    ),
    "depth": ("[(os.mkdir('d'), os.chdir('d')) for _ in range(1200)]", "judges"),
}
READS_ALL = """
import os, pathlib, time
assert 1 == len({path.read_text() and 1 for path in pathlib.Path(".").iterdir() if not path.is_dir()})
answer = pathlib.Path("answer").read_text()
time.sleep(60 * (answer == "sleep"))
open(os.environ["ETUDE_REWARD_FILE"], "w").write(answer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("walls", [True, False])
@pytest.mark.parametrize("left", LEFT)
def test_no_policy_escapes_its_verdict_by_what_it_leaves(loop_of, tmp_path, left, walls):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "answer").write_text("-0.5")
    leaves, outcome = LEFT[left]
    writes = "open('answer', 'w').write('-1')\n"
    program = ["python" if walls else sys.executable, "-c", PROGRAM + writes + leaves]
    seconds = 1.5 if left == "endless" else 30
    given = {"workspace": str(tmp_path / "task"), "verifier": command(READS_ALL), "verifier_seconds": seconds}
    [result], _ = roll(loop_of(command=program, **given, sandbox={"enable": walls}), scored=False)
    assert result.failures == 0
    assert (result.trajectory.rewards.score, result.trajectory.stop_reason) == (
        (-0.5, StopReason.AGENT_ERROR) if outcome == "fails" else (-1.0, StopReason.COMPLETED)
    )


@pytest.mark.parametrize("walls", [False, True])
def test_links_of_a_workspace_to_itself_lead_into_each_copy(loop_of, tmp_path, walls):
    """By its whole path, through which a rollout's agent wrote into the workspace of all."""
    (tmp_path / "task" / "v1").mkdir(parents=True)
    (tmp_path / "task" / "v1" / "count").write_text("0")
    (tmp_path / "task" / "in").mkdir()
    (tmp_path / "task" / "in" / "current").symlink_to(tmp_path / "task" / "v1")
    (tmp_path / "task" / "elsewhere").symlink_to("/usr/bin")
    program = PROGRAM + "n = int(open('in/current/count').read())\nopen('in/current/count', 'w').write(str(n + 1))"
    verify = command("import os\n" + REWARD.format("' + open('v1/count').read() + '"))
    given = {"workspace": str(tmp_path / "task"), "verifier": verify, "sandbox": {"enable": walls}}
    results, _ = roll(
        loop_of(command=["python" if walls else sys.executable, "-c", program], **given), rows=2, scored=False
    )
    assert [result.trajectory.rewards.score for result in results] == [1.0, 1.0]
    assert (tmp_path / "task" / "v1" / "count").read_text() == "0"


@pytest.mark.slow
def test_a_folder_too_large_to_come_back_does_not_earn_what_the_untouched_one_does(loop_of, tmp_path):
    """Its verifier saw the workspace as it was, whose tests pass in part."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "answer").write_text("0.5")
    for leaves, ended in (("", (-1.0, "completed")), ("open('big', 'wb').truncate(100 << 20)", (0.0, "agent_error"))):
        program = PROGRAM + "open('answer', 'w').write('-1')\n" + leaves
        given = {"workspace": str(tmp_path / "task"), "verifier": command(READS_ALL), "sandbox": {"enable": True}}
        [result], _ = roll(loop_of(command=["python", "-c", program], **given), scored=False)
        assert (result.trajectory.rewards.score, result.trajectory.stop_reason.value) == ended
        AGENT_LOOPS._items.pop("an_agent")


def test_a_verifier_that_fails_on_the_untouched_workspace_is_infrastructure(loop_of, tmp_path):
    given = {"command": command(PROGRAM), "workspace": str(tmp_path), "verifier_seconds": 0.5}
    [result], _ = roll(loop_of(**given, verifier=command("import time; time.sleep(60)")), scored=False)
    assert result.dropped is StopReason.INFRASTRUCTURE
    assert "took more than 0.5 s" in result.cause


def test_the_truth_is_the_verifiers_alone(loop_of, tmp_path, monkeypatch):
    """What a model wrote can read the stdin of the agent that runs it."""
    truth = {"reward_model": {"style": "rule", "ground_truth": "7"}}
    generate = AgentLoopManager.generate
    monkeypatch.setattr(
        AgentLoopManager, "generate", lambda self, rows, *more: generate(self, [row | truth for row in rows], *more)
    )
    given = {"command": command(PROGRAM + "open('seen', 'w').write(json.dumps(row))"), "workspace": str(tmp_path)}
    reads = "import json, os, sys\nheld = json.load(sys.stdin)['reward_model']['ground_truth']\n"
    reads += "seen = 'ground_truth' in open('seen').read()\n" + REWARD.format("' + str(10 * seen + int(held)) + '")
    [result], _ = roll(loop_of(**given, verifier=command(reads)), scored=False)
    assert result.trajectory.rewards.score == 7


@pytest.mark.skipif(shutil.which("mini") is None, reason="pip install mini-swe-agent; put its folder on PATH")
@pytest.mark.parametrize("walls", [False, True])
def test_mini_swe_agent_is_trained_as_it_is(loop_of, tmp_path, walls):
    """Real, and unchanged; its only tool is bash, and it ends when that prints its word."""
    (tmp_path / "task").mkdir()
    mini = Path(shutil.which("mini")).absolute()
    if walls and hidden(str(mini)):
        pytest.skip("its environment is below /tmp, of which each rollout has its own")
    quiet = ["MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors", *([] if walls else [f"HOME={tmp_path}"])]
    task = ["-m", "openai/policy", "-t", "Write 5.", "-y", "--exit-immediately", "-o", "log.json"]
    script = ["echo 0.5 > done.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    verify = "import os\n" + REWARD.format("' + open('done.txt').read() + '")
    given = {"workspace": str(tmp_path / "task"), "verifier": command(verify)}
    given["sandbox"] = {"enable": walls, "folders": [str(mini.parents[1])] if walls else []}
    name = loop_of(command=["env", *quiet, str(mini), *task], **given)
    turns = [says(call("bash", command=each)) for each in script]
    limits = {"prompt_length": 8000, "response_length": 4000}
    [result], _ = roll(name, lambda _, __, turn: turns[turn], scored=False, **limits)
    assert (result.trajectory.rewards.score, result.earlier) == (0.5, [])
    assert [record.name for record in result.trajectory.tool_calls] == ["bash", "bash"]


def test_a_workspace_that_does_not_exist_names_its_key(tmp_path):
    with pytest.raises(ConfigError, match="is no folder") as caught:
        check_openai_agent(OpenAIAgentOptions(command=(sys.executable,), workspace=str(tmp_path / "none")))
    assert caught.value.key.endswith("openai_agent.workspace")
    with pytest.raises(ConfigError, match="verifier '/no/such/program' cannot be started"):
        check_openai_agent(OpenAIAgentOptions(command=(sys.executable,), verifier=("/no/such/program",)))


HACK = "import os; open(os.environ['ETUDE_REWARD_FILE'], 'w').write('1')"  # what a model that wants the reward writes


@pytest.mark.parametrize(
    "verifier",
    [
        *(["./json.py"], ["bash", "-e", "json.py"], [sys.executable, "json.py"], [sys.executable, "-m", "json"], None),
        *(["env", "A=1", sys.executable, "json.py"], ["timeout", "9", "./json.py"]),
        *(["bash", "-ec", "cd . && python3 'json.py'"], ["sh", "-c", "if true; then ./json.py; fi"]),
    ],
)
def test_a_verifier_that_the_agent_can_rewrite_is_refused(loop_of, tmp_path, verifier):
    honest = [
        ["bash", "-eo", "pipefail", "-c", "true"],
        [sys.executable, "-X", "dev", "/opt/judge.py"],
        ["env", "true"],
        ["timeout", "9", "bash", "-c", "grep -q 5 json.py; /opt/judge json.py | python3 /opt/read.py"],
    ]
    for each in (*honest, [sys.executable, "-I", "-m", "json"], ["bash", "-o", "pipefail", "/opt/judge.sh", "json.py"]):
        check_openai_agent(OpenAIAgentOptions(command=("true",), workspace=str(tmp_path), verifier=tuple(each)))
    (tmp_path / "json.py").write_text("the honest one")
    program = PROGRAM + f"open('json.py', 'w').write({HACK!r})"
    judge = verifier or [sys.executable, "-c", "import json, os; open(os.environ['ETUDE_REWARD_FILE'], 'w').write('0')"]
    with pytest.raises(ConfigError, match=r"verifier: .* is read from the workspace, which the agent can rewrite"):
        roll(loop_of(command=command(program), verifier=judge, workspace=str(tmp_path)), scored=False)


def test_a_command_that_does_not_exist(loop_of):
    with pytest.raises(EtudeError, match="cannot be started"):
        roll(loop_of(command=["/no/such/program"]))


def test_a_file_that_is_no_program_is_told_at_once(loop_of, tmp_path):
    plain = tmp_path / "agent"
    plain.write_text("echo 1\n")
    with pytest.raises(ConfigError, match="cannot be started"):
        check_openai_agent(OpenAIAgentOptions(command=(str(plain),)))
    plain.chmod(0o755)
    check_openai_agent(OpenAIAgentOptions(command=(str(plain),)))
    with pytest.raises(EtudeError, match=r"cannot be started: .*Exec format error"):
        roll(loop_of(command=[str(plain)]))


ORPHAN = "import os; os.setsid(); os.fork() and os._exit(0); "


@pytest.mark.slow
@pytest.mark.parametrize(("leaves", "late"), [("", False), (ORPHAN, False), (ORPHAN, True)])
def test_what_a_command_leaves_behind_ends_with_it(loop_of, leaves, late, tmp_path):
    """Also an orphan in a session of its own, and where the command has to be killed (`late`)."""
    file = repr(str(tmp_path / "pid"))
    child = f"{leaves}import os, time, pathlib; pathlib.Path({file}).write_text(str(os.getpid())); time.sleep(60)"
    program = (
        PROGRAM
        + "import subprocess, pathlib, time\n"
        + f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        + f"while not pathlib.Path({file}).exists(): time.sleep(0.01)\n"
        + REWARD.format(0.5)
        + f"time.sleep({60 * late})\n"
    )
    before = set(os.listdir("/proc/self/fd"))
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]), trajectory_timeout=4.0 if late else 50.0)
    assert late or result.trajectory.rewards.score == 0.5
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not is_running(pid))


def test_a_command_may_say_much_and_read_nothing(loop_of):
    program = "print('x' * 3_000_000)\n" + PROGRAM.replace(
        "row = json.load(sys.stdin)", "row = {'raw_prompt': [{'role': 'user', 'content': 'a'}]}"
    )
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]))
    assert result.trajectory.response_ids == says("5")


WALLED = """
import pathlib, socket, subprocess, time
reached = []
for host in ("127.0.0.1", "192.0.2.1"):
    try:
        socket.create_connection((host, OTHER), 0.3)
        reached.append(host)
    except OSError:
        pass
try:
    reached.append(pathlib.Path(OUTSIDE).read_text())
except OSError:
    pass
pathlib.Path("start.txt").write_text(pathlib.Path("start.txt").read_text() + f"{reached}")
subprocess.Popen(["setsid", "sleep", "987"])
assert os.environ["ANTHROPIC_BASE_URL"] == os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
time.sleep(LATE)
"""


def _walled(outside, other, late=0):
    return PROGRAM + WALLED.replace("OUTSIDE", repr(str(outside))).replace("OTHER", str(other)).replace(
        "LATE", str(late)
    )


def sleepers():
    names = [name for name in os.listdir("/proc") if name.isdigit()]
    return [n for n in names if is_running(int(n)) and b"sleep\0987\0" in Path(f"/proc/{n}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_command_in_the_sandbox_reaches_its_policy_and_nothing_else(loop_of, tmp_path):
    """No file outside, no other port, nothing that goes on; what it left in its workspace is verified."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "start.txt").write_text("1")
    (tmp_path / "secret").write_text("secret")
    verify = command("import os\n" + REWARD.format("' + str(float(open('start.txt').read() == '1[]')) + '"))
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        program = _walled(tmp_path / "secret", elsewhere.getsockname()[1])
        given = {"workspace": str(tmp_path / "task"), "verifier": verify, "sandbox": {"enable": True}}
        results, _ = roll(loop_of(command=["python", "-c", program], **given), rows=2, scored=False)
        assert [result.trajectory.rewards.score for result in results] == [1.0] * 2
        assert [result.trajectory.stop_reason for result in results] == [StopReason.COMPLETED] * 2
        AGENT_LOOPS._items.pop("an_agent")
        given["sandbox"] |= {"wall_seconds": 2}  # too late, and cut off
        program = _walled(tmp_path / "secret", elsewhere.getsockname()[1], late=60)
        [result], _ = roll(loop_of(command=["python", "-c", program], **given), scored=False)
        assert (result.trajectory.rewards.score, result.trajectory.stop_reason) == (1.0, StopReason.AGENT_ERROR)
        until(lambda: not sleepers())
        AGENT_LOOPS._items.pop("an_agent")
        program = _walled(tmp_path / "secret", elsewhere.getsockname()[1])
        [result], _ = roll(loop_of(command=[sys.executable, "-c", program], **given | {"sandbox": None}), scored=False)
        assert result.trajectory.rewards.score == 0.0  # it finds what there is where there are no walls


@pytest.mark.parametrize(
    ("limit", "program", "statuses"),
    [
        ({"disk_mb": 20}, "head -c 30M /dev/zero >big || exit 8", ("status 8",)),
        (
            {"memory_mb": 50},
            "x=$(head -c 100M /dev/zero | tr '\\0' x); exit 9",
            ("cannot allocate", "status memory_limit"),
        ),
    ],
)
def test_the_sandboxs_folders_and_limits(loop_of, limit, program, statuses):
    """Whoever notices the memory first says so: the program or the sandbox."""
    [result], _ = roll(loop_of(command=["bash", "-c", program], sandbox={"enable": True, **limit}), scored=False)
    assert result.dropped is StopReason.AGENT_ERROR
    assert any(status in result.cause for status in statuses), result.cause


def test_the_sandboxs_folders_are_readable(loop_of):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # each rollout has a /tmp of its own
        Path(folder).chmod(0o755)  # the sandbox's user is another
        (Path(folder) / "note").write_text("here")
        program = f"cat {folder}/note >/dev/null && exit 7"
        for folders, status in (((folder,), "status 7"), ((), "No such file")):
            [result], _ = roll(
                loop_of(command=["bash", "-c", program], sandbox={"enable": True, "folders": folders}), scored=False
            )
            assert (result.dropped, status in result.cause) == (StopReason.AGENT_ERROR, True), result.cause
            AGENT_LOOPS._items.pop("an_agent")


def test_a_command_that_is_not_in_the_sandbox(loop_of):
    with pytest.raises(EtudeError, match="/no/such/program: No such file"):
        roll(loop_of(command=["/no/such/program"], sandbox={"enable": True}))


def test_a_machine_without_walls_says_what_to_do(monkeypatch):
    async def none(*_):
        raise SandboxUnavailableError("no isolated sandbox works here; install bubblewrap")

    monkeypatch.setattr(SandboxClient, "run", none)
    given = {"command": ("python",), "sandbox": AgentSandboxOptions(enable=True)}
    with pytest.raises(ConfigError, match="install bubblewrap") as caught:
        check_openai_agent(OpenAIAgentOptions(**given))
    assert (caught.value.key.rpartition(".")[2], "set it to false" in caught.value.fix) == ("enable", True)
    with pytest.raises(ConfigError, match="/tmp is no folder, or below"):
        check_openai_agent(
            OpenAIAgentOptions(command=("a",), sandbox=AgentSandboxOptions(enable=True, folders=("/tmp",)))
        )
    with pytest.raises(ConfigError, match="needs a command"):
        OpenAIAgentOptions(sandbox=AgentSandboxOptions(enable=True))
