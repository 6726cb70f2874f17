"""Cells that share their variables: what they return, how they fail, when they end."""

import asyncio
import contextlib
import itertools
import signal

import psutil
import pytest

from etude.sandbox import (
    Executor,
    ExecutorOptions,
    Limits,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    UnknownSessionError,
)


def cells(sandbox, *codes, seconds=(), **options):
    """What the cells of one session return; `seconds`: the time of each, where it has one."""

    async def run():
        session = await sandbox.executor.session(**options)
        timed = itertools.zip_longest(codes, seconds)
        results = [await sandbox.executor.run_cell(session, code, most) for code, most in timed]
        await sandbox.executor.close_session(session)
        return results

    return sandbox.do(run())


def test_variables_survive_and_the_last_expression_is_shown(sandbox):
    first, second, third = cells(sandbox, "x = 41\nprint('out')", "import sys\nsys.stderr.write('err')\nx + 1", "_ + 1")
    assert (first.stdout, first.text, first.status) == ("out\n", None, RunStatus.FINISHED)
    assert (second.stdout, second.stderr, second.text) == ("", "err", "42")
    assert third.text == "43"


def test_an_error_has_the_cells_own_traceback(sandbox):
    broken, after = cells(sandbox, "def f():\n    return 1 / 0\nf()", "f.__name__")
    assert broken.error.name == "ZeroDivisionError"
    assert broken.error.value == "division by zero"
    assert 'File "<cell 1>", line 3' in broken.error.traceback
    assert "return 1 / 0" in broken.error.traceback
    assert "guest" not in broken.error.traceback
    assert broken.session_alive
    assert after.text == "'f'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "text", "error"),
    [
        ("x = (", None, "SyntaxError"),
        ("exit()", None, "SystemExit"),
        ("None", None, None),
        ("1; 2", "2", None),
        ("", None, None),
        ("import asyncio\nawait asyncio.sleep(0.001)\n5", "5", None),
        ("await asyncio.sleep(0)\n1/0", None, "NameError"),
        ("raise KeyboardInterrupt", None, "KeyboardInterrupt"),
        ("class A:\n def __repr__(self): raise ValueError\nA()", None, "ValueError"),
        ("'é' * 2", "'éé'", None),
        ("'x' * 3_000_000", "'" + "x" * ((1 << 20) - 1) + "… [1951426 more characters]", None),
    ],
)
def test_cells_of_every_kind(isolated_sandbox, code, text, error):
    (result,) = cells(isolated_sandbox, code)
    assert result.text == text
    assert (result.error.name if result.error else None) == error
    assert result.session_alive


@pytest.mark.parametrize(
    ("code", "stdout", "text", "error"),
    [
        ("!echo hello", "hello\n", None, None),
        ("print('a')\n!echo b; echo c\nprint('d')\n6 * 7", "a\nb\nc\nd\n", "42", None),
        ("for i in range(2):\n    !echo it\\'s $((1 + 1))\n", "it's 2\nit's 2\n", None, None),
        ('%matplotlib inline\ns = """\n%d\n!x"""\nprint(s % 5)', "\n5\n!x\n", None, None),
        ("x = (7\n% 4)\nx", "", "3", None),
        ("!exit 3\n_exit_code", "", "3", None),
        ("!echo \"(\" '[' `echo {`\n%matplotlib notebook\n'on'", "( [ {\n", "'on'", None),
        ("%timeit x", "", None, "NameError"),
        ("1 +\n!echo a", "", None, "SyntaxError"),
        ("print('a'\n", "", None, "SyntaxError"),
        ("%", "", None, "NameError"),
    ],
)
def test_lines_of_a_notebook_that_are_no_python(isolated_sandbox, code, stdout, text, error):
    (result,) = cells(isolated_sandbox, code)
    assert (result.stdout, result.text) == (stdout, text)
    assert (result.error.name if result.error else None) == error


def test_a_shell_line_is_interrupted_with_its_cell(isolated_sandbox):
    late, after = cells(isolated_sandbox, "x = 5\n!sleep 60", "x", seconds=[0.3])
    assert (late.status, late.session_alive, after.text) == (RunStatus.TIME_LIMIT, True, "5")


@pytest.mark.slow
def test_figures_and_pictures_are_png(isolated_sandbox):
    figure, picture, shown, closed = cells(
        isolated_sandbox,
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nplt.plot([2, 1])\n'drawn'",
        "from PIL import Image\nImage.new('RGB', (3, 2), 'red')",
        "display(Image.new('RGB', (3, 3)), 5)",
        "plt.get_fignums()",
    )
    assert (figure.text, len(figure.images)) == ("'drawn'", 2)
    assert len(picture.images) == len(shown.images) == 1
    assert shown.stdout == "5\n"
    assert all(image.startswith(b"\x89PNG") for image in (*figure.images, *picture.images, *shown.images))
    assert (closed.text, closed.images) == ("[]", ())


def test_a_cell_that_takes_too_long_is_interrupted_and_the_session_lives(sandbox):
    _, late, after = cells(sandbox, "x = 5", "print('a')\nimport time\ntime.sleep(60)", "x", seconds=[None, 0.3])
    assert (late.status, late.stdout, late.error.name) == (RunStatus.TIME_LIMIT, "a\n", "KeyboardInterrupt")
    assert late.session_alive
    assert (after.status, after.text) == (RunStatus.FINISHED, "5")


def test_a_cell_that_cannot_be_interrupted_ends_its_session(sandbox):
    async def run():
        session = await sandbox.executor.session()
        stubborn = "import time\nprint('a', flush=True)\nwhile True:\n try: time.sleep(60)\n except BaseException: pass"
        late = await sandbox.executor.run_cell(session, stubborn, 0.2)
        with pytest.raises(UnknownSessionError, match="no session"):
            await sandbox.executor.run_cell(session, "1")
        return late

    late = sandbox.do(run())
    assert (late.status, late.stdout, late.session_alive) == (RunStatus.TIME_LIMIT, "a\n", False)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os\nprint('a', flush=True)\nos._exit(3)", RunStatus.FINISHED),
        ("import os\nprint('a', flush=True)\nos.kill(os.getpid(), 11)", RunStatus.FINISHED),
        ("import os\nprint('a', flush=True)\nos.write(3, b'x' * 100)", RunStatus.KILLED),
    ],
)
def test_an_interpreter_that_dies_says_how(isolated_sandbox, code, status):
    (result,) = cells(isolated_sandbox, code)
    assert (result.status, result.stdout, result.session_alive) == (status, "a\n", False)


def test_a_session_that_breaks_a_limit_ends(isolated_sandbox):
    memory = Limits(memory_mb=128)
    hungry = (
        "import os, time\nfor _ in range(4):\n  if os.fork() == 0: x = b'x' * (60 << 20); time.sleep(9)\ntime.sleep(9)"
    )
    (result,) = cells(isolated_sandbox, hungry, limits=memory)
    assert (result.status, result.session_alive) == (RunStatus.MEMORY_LIMIT, False)
    (result,) = cells(isolated_sandbox, "while True: pass", limits=Limits(cpu_seconds=0.3))
    assert (result.status, result.session_alive) == (RunStatus.TIME_LIMIT, False)


def test_cells_wait_for_each_other_and_sessions_do_not(isolated_sandbox):
    async def run():
        one, other = await isolated_sandbox.executor.session(), await isolated_sandbox.executor.session()
        run_cell = isolated_sandbox.executor.run_cell
        await run_cell(one, "import time\nlog = []")
        slow = asyncio.ensure_future(run_cell(one, "time.sleep(0.4)\nlog.append(1)"))
        await asyncio.sleep(0)
        fast = asyncio.ensure_future(run_cell(one, "log.append(2)\nlog"))
        elsewhere = await run_cell(other, "'log' in globals()")
        overtaken = not slow.done()
        results = await asyncio.gather(slow, fast)
        for session in (one, other):
            await isolated_sandbox.executor.close_session(session)
        return elsewhere.text, overtaken, results[1].text

    assert isolated_sandbox.do(run()) == ("False", True, "[1, 2]")


def test_files_of_a_session(isolated_sandbox):
    async def run():
        executor = isolated_sandbox.executor
        session = await executor.session(Limits(disk_mb=8), {"a.txt": b"1"})
        text = (await executor.run_cell(session, "open('a.txt').read()")).text
        await executor.write_files(session, {"b/c.txt": b"2"})
        await executor.run_cell(session, "open('d.txt', 'w').write(open('b/c.txt').read() * 2)")
        fetched = await executor.fetch_files(session, ["d.txt", "none"])
        with pytest.raises(SandboxRequestError, match="absolute"):
            await executor.fetch_files(session, ["/etc/passwd"])
        with pytest.raises(SandboxRequestError, match="No space"):
            await executor.write_files(session, {"large": bytes(100 << 20)})
        alive = (await executor.run_cell(session, "1")).text
        await executor.close_session(session)
        await executor.close_session(session)
        with pytest.raises(UnknownSessionError):
            await executor.fetch_files(session, ["d.txt"])
        return text, fetched, alive

    assert isolated_sandbox.do(run()) == ("'1'", {"d.txt": b"22"}, "1")


def test_a_cancelled_cell_ends_its_session(isolated_sandbox):
    async def run():
        executor = isolated_sandbox.executor
        session = await executor.session()
        task = asyncio.ensure_future(executor.run_cell(session, "import time\ntime.sleep(60)"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(UnknownSessionError):
            await executor.run_cell(session, "1")

    isolated_sandbox.do(run())


async def test_idle_sessions_expire_and_busy_ones_do_not():
    options = ExecutorOptions(session_idle_seconds=0.4, max_sessions=2)
    async with await Executor.open(workers=1, options=options) as executor:
        idle, busy = await executor.session(), await executor.session()
        with pytest.raises(SandboxError, match="which is the maximum"):
            await executor.session()
        result = await executor.run_cell(busy, "import time\ntime.sleep(1.2)\n'still here'")
        with pytest.raises(UnknownSessionError):
            await executor.run_cell(idle, "1")
    assert result.text == "'still here'"


SPINS = """
import threading, time
turns = 0
def spin():
    global turns
    while True:
        turns += 1
threading.Thread(target=spin, daemon=True).start()
time.sleep(0.1)
time.process_time()
"""
WAKES_ITSELF = """
import ctypes, signal, struct
signal.signal(signal.SIGCONT, lambda *_: None)
libc = ctypes.CDLL(None, use_errno=True)
timer = ctypes.c_void_p()
event = ctypes.create_string_buffer(struct.pack("=QiiQ", 0, 18, 0, 0), 64)  # sends SIGCONT
assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, struct.pack("=qqqq", 0, 5_000_000, 0, 5_000_000), None) == 0
"""


def cpu_between_cells(sandbox, code, seconds):
    """The CPU seconds that a session uses by itself in `seconds` between two cells; None if it was ended for it."""

    async def run():
        session = await sandbox.executor.session()
        before = await sandbox.executor.run_cell(session, code)
        assert before.error is None, before.error
        await asyncio.sleep(seconds)
        try:
            after = await sandbox.executor.run_cell(session, "time.process_time()")
            further = await sandbox.executor.run_cell(session, "was = turns; time.sleep(0.2); turns > was")
        except UnknownSessionError:
            return None
        await sandbox.executor.close_session(session)
        if not after.session_alive:
            return None
        assert further.text == "True"  # while a cell runs, the thread does
        return float(after.text) - float(before.text)

    return sandbox.do(run())


def test_what_a_cell_leaves_running_computes_only_during_cells(sandbox):
    assert cpu_between_cells(sandbox, SPINS, 1.5) < 0.3


@pytest.mark.slow
def test_so_do_processes_that_it_leaves(sandbox):
    burns = "import subprocess, sys, time\nleft = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
    count = "sum(map(int, open(f'/proc/{left.pid}/stat').read().rpartition(')')[2].split()[11:13]))"

    async def run():
        session = await sandbox.executor.session()
        first = await sandbox.executor.run_cell(session, f"{burns}time.sleep(0.3)\n{count}")
        await asyncio.sleep(1.5)
        second = await sandbox.executor.run_cell(session, count)
        third = await sandbox.executor.run_cell(session, f"time.sleep(0.5)\nleft.poll(), {count}")
        await sandbox.executor.close_session(session)
        return int(first.text), int(second.text), third.text

    first, second, third = sandbox.do(run())
    assert second - first < 30, "ticks of 10 ms"
    assert third.startswith("(None, ")
    assert int(third[7:-1]) > second


def test_a_session_that_wakes_itself_between_cells_is_stopped_again(isolated_sandbox):
    used = cpu_between_cells(isolated_sandbox, f"{WAKES_ITSELF}\n{SPINS}", 2.0)
    assert used is None or used < 0.8


def test_a_session_that_cannot_be_stopped_is_ended(isolated_sandbox):
    async def run():
        others = {process.pid for process in psutil.Process().children(recursive=True)}
        session = await isolated_sandbox.executor.session()
        await isolated_sandbox.executor.run_cell(session, SPINS)
        for _ in range(500):
            for process in psutil.Process().children(recursive=True):
                if process.pid not in others:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)
            if all(process.pid in others for process in psutil.Process().children(recursive=True)):
                break
        cell = await isolated_sandbox.executor.run_cell(session, "1")
        assert (cell.status, cell.session_alive) == (RunStatus.TIME_LIMIT, False)

    isolated_sandbox.do(run())


async def test_cells_of_all_sessions_share_the_workers():
    clock = "import time\nbegan = time.monotonic()\ntime.sleep(0.2)\nbegan, time.monotonic()"
    async with await Executor.open(workers=1) as executor:
        sessions = [await executor.session() for _ in range(3)]
        cells = await asyncio.gather(*(executor.run_cell(each, clock) for each in sessions))
        times = sorted(eval(cell.text) for cell in cells)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(times))
