"""What programs see and what comes back, in every mode; what goes wrong, and how it is told."""

import asyncio
import signal

import psutil
import pytest

from etude.sandbox import (
    Language,
    Limits,
    RunRequest,
    RunStatus,
    SandboxError,
    SandboxRequestError,
)

HUNGRY = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = b"x" * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""

DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", sys.argv[1]])
    os._exit(0)
os.wait()
"""

HERE = {
    Language.PYTHON: "import sys\nprint(sys.stdin.read().upper(), *sys.argv[1:])",
    Language.BASH: 'read x; echo "${x^^} $*"',
    Language.JAVASCRIPT: 'console.log(require("fs").readFileSync(0, "utf8").toUpperCase(), ...process.argv.slice(2))',
    Language.C: '#include <stdio.h>\nint main(int n, char **v) { char x[9]; scanf("%s", x); printf("HI %s\\n", v[1]); }',
    Language.CPP: '#include <iostream>\nint main(int n, char **v) { std::cout << "HI " << v[1] << std::endl; }',
}


@pytest.mark.parametrize("language", list(HERE), ids=lambda language: language.value)
def test_a_program_of_each_language(sandbox, language):
    if language not in sandbox.executor.languages:
        pytest.skip(f"{language.value} is not installed")
    result = sandbox.run(HERE[language], language=language, stdin="hi", args=["a b"])
    assert result.status is RunStatus.FINISHED, result
    assert (result.return_code, result.stdout, result.stderr) == (0, "HI a b\n", "")
    assert (result.compile is not None) == (language in (Language.C, Language.CPP))
    assert result.wall_seconds > 0


def test_a_program_opens_its_streams_by_name(sandbox):
    code = "echo to > /dev/stderr\ntr a-z A-Z < /dev/stdin > /dev/stdout"
    result = sandbox.run(code, language=Language.BASH, stdin="hi\n")
    assert (result.return_code, result.stdout, result.stderr) == (0, "HI\n", "to\n")


@pytest.mark.slow
def test_pytest_collects_and_runs_tests(sandbox):
    assert {*HERE, Language.PYTEST} == set(Language)
    code = "def test_good(): pass\ndef test_bad(): assert 0"
    result = sandbox.run(code, language="pytest", args=["-k", "good"])
    assert (result.status, result.return_code) == (RunStatus.FINISHED, 0), result
    assert "1 passed, 1 deselected" in result.stdout
    assert sandbox.run(code, language="pytest").return_code == 1


def test_what_does_not_compile(sandbox):
    if Language.C not in sandbox.executor.languages:
        pytest.skip("no C compiler")
    result = sandbox.run("int main( {", language="c")
    assert result.status is RunStatus.COMPILE_FAILED
    assert result.return_code is None
    assert result.compile.return_code == 1
    assert "main.c:1" in result.compile.stderr


@pytest.mark.parametrize(
    ("code", "return_code", "stdout", "stderr"),
    [
        ("print('a'); raise SystemExit(3)", 3, "a\n", ""),
        ("import sys; print('a'); sys.exit('why')", 1, "a\n", "why\n"),
        ("exit()", 0, "", ""),
        ("import os; os._exit(258)", 2, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "", ""),
        ("raise KeyboardInterrupt", 130, "", "KeyboardInterrupt\n"),
        ("import atexit; atexit.register(print, 'bye'); print('hi')", 0, "hi\nbye\n", ""),
        ("import threading as t, time\nt.Thread(target=lambda: (time.sleep(.05), print('late'))).start()", 0, "late\n", ""),
        ("class A:\n def __del__(self): print('gone')\na = A()", 0, "gone\n", ""),
        ("import os\nprint(1, flush=True)\nif os.fork() == 0: os._exit(0)\nos.wait(); print(2)", 0, "1\n2\n", ""),
        ("import warnings; print(__name__, __file__.endswith('main.py'), __doc__)", 0, "__main__ True None\n", ""),
        ("'''about'''\nprint(__doc__)", 0, "about\n", ""),
        ("def f(): pass\nimport pickle\nprint(pickle.loads(pickle.dumps(f)) is f)", 0, "True\n", ""),
        ("print(input(), end='|')", 1, "", "EOFError"),
        ("import inspect\ndef f(): return 1\nprint(inspect.getsource(f))", 0, "def f(): return 1\n\n", ""),
        ("x: int = 1\nprint(__annotations__)", 0, "{'x': <class 'int'>}\n", ""),
        ("import sys\nsys.excepthook = lambda *a: print('mine')\n1/0", 1, "mine\n", ""),
        ("from __future__ import annotations\nprint(1)", 0, "1\n", ""),
        ("import subprocess as s, sys\nprint(s.check_output([sys.executable, '-c', 'print(7)']))", 0, "b'7\\n'\n", ""),
        ("import multiprocessing as m\nprint(m.get_context('fork').Pool(2).map(abs, [-1, -2]))", 0, "[1, 2]\n", ""),
        ("import asyncio\nprint(asyncio.run(asyncio.sleep(0.01, 5)))", 0, "5\n", ""),
        ("print('\\ud800')", 1, "", "UnicodeEncodeError"),
        ("print('é' * 3)", 0, "ééé\n", ""),
        ("import numpy; print(numpy.arange(4).sum())", 0, "6\n", ""),
    ],
)  # fmt: skip
def test_python_behaves_as_the_interpreter_does(sandbox, code, return_code, stdout, stderr):
    result = sandbox.run(code)
    assert result.status is RunStatus.FINISHED
    assert (result.return_code, result.stdout) == (return_code, stdout), result
    assert stderr in result.stderr
    assert stderr or not result.stderr


def test_an_exception_has_the_programs_own_traceback(sandbox):
    result = sandbox.run("def f():\n    return 1 / 0\n\nf()\n")
    assert result.return_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "main.py" in lines[1]
    assert "line 4" in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "guest" not in result.stderr


def test_a_syntax_error_shows_its_line(sandbox):
    result = sandbox.run("x = 1\ny = (2\n")
    assert result.return_code == 1
    assert "y = (2" in result.stderr
    assert "SyntaxError: '(' was never closed" in result.stderr


def test_files_go_in_and_come_out(sandbox):
    code = "import helper, os\nos.makedirs('out')\nprint(helper.x)\n"
    code += "open('out/b.bin', 'wb').write(open('data/a.bin', 'rb').read()[::-1])"
    files = {"helper.py": b"x = 5", "data/a.bin": b"\x00\x01\xff"}
    result = sandbox.run(code, files=files, fetch_files=["out/b.bin", "missing", "out"])
    assert (result.stdout, result.files) == ("5\n", {"out/b.bin": b"\xff\x01\x00"}), result
    assert list(result.refused_files) == ["out"]


def test_the_codes_own_name_is_taken(sandbox):
    with pytest.raises(SandboxRequestError, match=r"main\.py"):
        sandbox.run("1", files={"main.py": b""})


def test_files_that_do_not_fit(isolated_sandbox):
    with pytest.raises(SandboxRequestError, match="No space left"):
        isolated_sandbox.run("1", files={"a": bytes(3 << 20)}, limits=Limits(disk_mb=2))
    with pytest.raises(SandboxRequestError, match="too long"):
        isolated_sandbox.run("1", files={"a" * 300: b""})


def test_time_limits(sandbox):
    result = sandbox.run("print('before', flush=True)\nwhile True: pass", limits=Limits(wall_seconds=0.3))
    assert (result.status, result.return_code, result.stdout) == (RunStatus.TIME_LIMIT, None, "before\n")
    assert result.wall_seconds >= 0.3
    result = sandbox.run("while True: pass", limits=Limits(cpu_seconds=0.3))
    assert result.status is RunStatus.TIME_LIMIT
    assert result.cpu_seconds >= 0.3


def test_memory_limits(sandbox):
    result = sandbox.run("x = bytearray(1 << 30)", limits=Limits(memory_mb=200))
    assert result.return_code == 1
    assert "MemoryError" in result.stderr
    assert sandbox.run(HUNGRY, limits=Limits(memory_mb=128)).status is RunStatus.MEMORY_LIMIT


def test_no_process_outlives_its_run(sandbox):
    sandbox.run(DAEMON, args=["611.25"])
    assert not [p for p in psutil.process_iter(["cmdline"]) if "611.25" in (p.info["cmdline"] or [])]


def test_output_is_truncated_with_a_mark(sandbox):
    result = sandbox.run("print('a' * 5_000_000)", limits=Limits(output_bytes=1000))
    assert result.status is RunStatus.FINISHED
    assert result.stdout_truncated
    assert "bytes left out" in result.stdout
    assert not result.stderr_truncated


def test_undecodable_output_is_replaced(sandbox):
    result = sandbox.run("import os; os.write(1, b'a\\xffb\\x00')")
    assert result.stdout == "a\ufffdb\0"


def test_many_at_once(sandbox):
    async def many():
        return await asyncio.gather(*(sandbox.executor.run(RunRequest(f"print({n} * {n})")) for n in range(40)))

    assert [result.stdout for result in sandbox.do(many())] == [f"{n * n}\n" for n in range(40)]


def test_a_cancelled_run_leaves_nothing(sandbox):
    async def cancel():
        request = RunRequest("import os\nos.execvp('sleep', ['sleep', '622.5'])")
        task = asyncio.ensure_future(sandbox.executor.run(request))
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if any("622.5" in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(1000):
            if not any("622.5" in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
                return True
            await asyncio.sleep(0.01)
        return False

    assert sandbox.do(cancel())
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_killed_fork_server_is_replaced(isolated_sandbox):
    """A run that is under way when the jail dies is the sandbox's failure; the next one has a new jail."""

    async def kill():
        running = asyncio.ensure_future(isolated_sandbox.executor.run(RunRequest("import time; time.sleep(30)")))
        await asyncio.sleep(0.3)
        fork_server = isolated_sandbox.executor._fork_server
        signal.pidfd_send_signal(fork_server._pidfd, signal.SIGKILL)
        return await running

    with pytest.raises(SandboxError):
        isolated_sandbox.do(kill())
    assert isolated_sandbox.run("print(1)").stdout == "1\n"


def test_a_language_that_is_not_installed(isolated_sandbox, monkeypatch):
    monkeypatch.setattr(isolated_sandbox.executor, "languages", (Language.PYTHON,))
    with pytest.raises(SandboxRequestError, match="javascript needs 'node'"):
        isolated_sandbox.run("1", language="javascript")


def test_shared_memory_without_a_file_cannot_hide_from_the_limit(isolated_sandbox):
    program = (
        "import mmap\nheld = []\nfor _ in range(10):\n    one = mmap.mmap(-1, 64 << 20)\n"
        "    one.write(b'x' * (64 << 20))\n    one.resize(4096)\n    held.append(one)\nprint('held')"
    )
    result = isolated_sandbox.run(program, limits=Limits(memory_mb=256))
    assert "held" not in result.stdout
    zeros = "import mmap, os\nfile = os.open('/dev/zero', os.O_RDWR)\nassert os.read(file, 9) == bytes(9)\n"
    result = isolated_sandbox.run(f"{zeros}mmap.mmap(file, 4096)")
    assert result.stderr.endswith("OSError: [Errno 19] No such device\n"), result
    result = isolated_sandbox.run(
        "import mmap\nassert mmap.mmap(-1, 99, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)[:1] == b'\\0'"
    )
    assert result.return_code == 0, result.stderr
