"""The reward for code: verl's forms of tests, what counts as right, ways to cheat, and a sandbox that fails."""

import asyncio
import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, DataError, InfrastructureError, is_infrastructure
from etude.rewards import SCORERS, code, compute_score, load_compute_score
from etude.rewards.code import MAX_TIMEOUTS, extract_code, score_code
from etude.rewards.code_judge import AssertCase, CallCase, StdioCase, read_cases, same_output, same_value
from etude.sandbox import RunResult, RunStatus, SandboxClient, SandboxError

pytestmark = pytest.mark.usefixtures("isolation")

SHARED = Path(__file__).parents[2].parent / "shared"


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture(scope="module")
def client():
    opened = SandboxClient(workers=4)
    yield opened
    opened.close()


async def scored(client, program, tests, **options):
    return await score_code(fenced(program), tests, client=client, timeout=options.pop("timeout", 5), **options)


EVERY_KIND = (
    "[None, True, 5, -(10 ** 30), 1.5, float('inf'), 'x\\ud800', b'\\x00', bytearray(b'a'), 1 + 2j, [1, [2]], (1,), "
    "{1, 'a'}, "
    "frozenset({2}), {(1, 2): [3]}, range(3), deque([1]), decimal.Decimal('1.10'), fractions.Fraction(1, 3), "
    "datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3), datetime.timedelta(1, 2, 3)]"
)
TO_BE_CHEATED = {
    "assert_case": [
        "assert f(2) == 4",
        "import textwrap\nassert math.isclose(f(2.5), 6.25) and abs(f(-1) - 1) < 1e-9",
        "assert sorted(set([f(1), f(3)])) == [1, 9] and isinstance(f(5), int) and all([f(5) == 25])",
        "def check(candidate):\n    assert candidate(7) == 49, 'no'\n\ncheck(f)",
    ]
}
EQUAL = "def f(x): return E()\nclass E"
ALL = "__eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True\n"
PARENT = "import os, sys, ctypes, signal, json, struct, threading, time, math\nparent = os.getppid()\n"
SAY = "def say(m):\n    d = json.dumps(m).encode()\n    os.write(3, struct.pack('!I', len(d)) + d)\n"
CHEATS = {
    "ends with status 0": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "raises SystemExit": "raise SystemExit",
    "ends at once when called": "def f(x):\n    import os; os._exit(0)",
    "ends when called": "def f(x):\n    import sys; sys.exit(0)",
    "prints a result": "import sys, json; print(json.dumps(None)); sys.exit(0)",
    "leaves the work to a child": "import os\nif os.fork() == 0: pass\nelse: os._exit(0)",
    "ends a little later": "import threading, os\nthreading.Timer(0.05, lambda: os._exit(0)).start()\n"
    "def f(x):\n    while True: pass",
    "prints the secret of a frame": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    job = frame.f_locals.get('job')\n    if job: print('\\n' + job['secret'] + 'null', flush=True); sys.exit(0)\n"
    "    frame = frame.f_back",
    "finds the secret among all objects": "import gc, os\nfor o in gc.get_objects():\n"
    "    if isinstance(o, dict) and 'secret' in o: os.write(1, f\"\\n{o['secret']}null\\n\".encode()); os._exit(0)",
    "replaces exec": "import builtins\nbuiltins.exec = lambda *_: None",
    "replaces compile": "import builtins\nbuiltins.compile = lambda *_: (lambda: None).__code__",
    "replaces builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.set = lambda x: [1, 9]\n"
    "builtins.all = builtins.isinstance = lambda *_: True\ndef f(x): return 0",
    "defines builtins": "def sorted(x): return [1, 9]\ndef set(x): return x\ndef abs(x): return 0\n"
    "def all(x): return True\nisinstance = all\ndef f(x): return 0",
    "defines math": "class math:\n    isclose = lambda *_: True\nabs = lambda x: 0\ndef f(x): return 0",
    "patches math": "import math, builtins\nmath.isclose = lambda *_: True\nbuiltins.abs = lambda x: 0\ndef f(x): return 0",
    "defines check": "def check(candidate): pass\ndef f(x): return 0",
    "shadows modules": "for name in ('math', 'textwrap', 'cmath', 'json', 'ast'):\n"
    "    open(name + '.py', 'w').write('import builtins, os\\nisclose = lambda *a: True\\nbuiltins.abs = lambda x: 0\\n')\n"
    "import math\nmath.isclose = lambda *_: True\ndef f(x): return 0",
    "equals everything": f"{EQUAL}:\n    {ALL}    __hash__ = lambda self: 1",
    "is an int that equals everything": f"{EQUAL}(int):\n    {ALL}    __hash__ = lambda self: 1\n    __sub__ = lambda *_: 0",
    "is a float that equals everything": f"{EQUAL}(float):\n    {ALL}    __hash__ = lambda self: 1",
    "lies about its class": f"{EQUAL}:\n    {ALL}    __class__ = property(lambda self: int)\n    __float__ = lambda s: 6.25",
    "converts to everything": f"{EQUAL}:\n    {ALL}    __index__ = __int__ = lambda s: 4\n    __float__ = lambda s: 6.25\n"
    "    __sub__ = lambda s, o: 0\n    __abs__ = lambda s: 0",
    "offers an array interface": f"{EQUAL}:\n    {ALL}    __array_interface__ = dict(shape=(1,), typestr='<i8', version=3, "
    "data=(4096, True))",
    "has an equal metaclass": "class M(type):\n    __eq__ = lambda *_: True\n    __hash__ = lambda s: 1\n"
    "class E(metaclass=M): pass\ndef f(x): return E",
    "returns a mock": "from unittest import mock\ndef f(x): return mock.ANY",
    "is a mock": "from unittest import mock\nf = mock.MagicMock()\nmath = mock.MagicMock()",
    "reads the checker's memory": PARENT + "text = b''\nfor line in open(f'/proc/{parent}/maps'):\n"
    "    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n    try:\n"
    "        text = os.pread(os.open(f'/proc/{parent}/mem', os.O_RDONLY), min(b - a, 1 << 24), a)\n"
    "    except OSError: continue\n    if b'secret' in text: f = lambda x: x * x",
    "reads the checker's input": PARENT
    + "job = json.loads(open(f'/proc/{parent}/fd/0').read(1 << 16))\nf = lambda x: x * x",
    "prints into the checker's output": PARENT + "open(f'/proc/{parent}/fd/1', 'w').write('x')\nf = lambda x: x * x",
    "reads its environment": PARENT
    + "assert b'=' in open(f'/proc/{parent}/environ', 'rb').read()\nf = lambda x: x * x",
    "traces the checker": PARENT + "libc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.ptrace(16, parent, 0, 0) == 0: f = lambda x: x * x",
    "copies the checker's memory": PARENT
    + "libc = ctypes.CDLL(None, use_errno=True)\nhere = ctypes.create_string_buffer(8)\n"
    "class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
    "mine, theirs = V(ctypes.addressof(here), 8), V(id(f'{parent}'), 8)\n"
    "if libc.process_vm_readv(parent, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0: f = lambda x: x * x",
    "takes the checker's descriptor": PARENT + "pidfd = os.pidfd_open(parent)\n"
    "if ctypes.CDLL(None).syscall(438, pidfd, 0, 0) >= 0: f = lambda x: x * x",
    "ends the checker": PARENT + "os.kill(parent, signal.SIGKILL)",
    "asks the checker to end": PARENT + "os.kill(parent, signal.SIGTERM)",
    "interrupts the checker": PARENT + "def f(x):\n    os.kill(parent, signal.SIGINT)\n    time.sleep(9)",
    "stops the checker": PARENT + "def f(x):\n    os.kill(parent, signal.SIGSTOP)\n    return 0",
    "limits the checker": PARENT + "import resource\nresource.prlimit(parent, resource.RLIMIT_AS, (1, 1))\n"
    "resource.prlimit(parent, resource.RLIMIT_NOFILE, (0, 0))\ndef f(x): return 0",
    "closes the connection": "import os\nos.closerange(0, 100)",
    "sends what is not a message": PARENT + "def f(x):\n    os.write(3, b'\\xff' * 64)",
    "sends a message without end": PARENT + "def f(x):\n    os.write(3, b'\\x00\\xff\\xff\\xff')\n    time.sleep(9)",
    "sends deep nesting": PARENT + "def f(x):\n    d = b'[' * 100000\n    os.write(3, struct.pack('!I', len(d)) + d)",
    "sends the checker's exec": PARENT + SAY + "def f(x): say({'value': {'builtin': 'exec'}})",
    "sends an object of the checker": PARENT + SAY + "def f(x): say({'value': {'yours': 0}})",
    "asks the checker to call": PARENT
    + SAY
    + "def f(x): say({'do': 'call', 'with': [{'builtin': 'exec'}, ['1'], {'dict': []}]})",
    "has the checker make a class whose objects equal everything": PARENT
    + SAY
    + "def hear(): return json.loads(os.read(3, int.from_bytes(os.read(3, 4), 'big')))\n"
    "def ask(function, *arguments):\n    say({'do': 'call', 'with': [function, list(arguments), {'dict': []}]})\n"
    "    return {'yours': hear()['value']['object']}\n"
    "names = ('eq', 'call', 'lt', 'le', 'gt', 'ge', 'sub', 'abs', 'contains', 'hash')\n"
    "def f(x):\n    made = [[f'__{name}__', {'object': 0}] for name in names]\n"
    "    kind = ask({'builtin': 'type'}, 'E', {'tuple': [{'builtin': 'object'}]}, {'dict': made})\n"
    "    say({'value': ask(kind)})\n    while hear(): say({'value': True})",
    "asks the checker for attributes": PARENT
    + SAY
    + "def f(x): say({'do': 'getattr', 'with': [{'yours': 0}, '__globals__']})",
    "sends an exit": PARENT + SAY + "def f(x): say({'error': ['SystemExit', '0']})",
    "sends a class that is no error": PARENT + SAY + "def f(x): say({'error': ['print', 'x']})",
    "answers ahead": PARENT + SAY + "def f(x):\n    for _ in range(9): say({'value': True})\n    return True",
    "imports in the checker": PARENT + SAY + "open('evil.py', 'w').write('import os; os._exit(0)')\n"
    "def f(x): say({'value': {'evil': []}})",
    "never answers": "def f(x):\n    while True: pass",
    "never ends its value": "def f(x):\n    while True: yield 4",
    "returns true": "def f(x): return True",
    "returns not a number": "def f(x): return float('nan')",
    "raises": "def f(x): raise AssertionError",
    "returns itself": "def f(x): return f",
    "returns the checker's truth": "def f(x): return type",
    "hides in a dictionary": f"class K(str):\n    {ALL}    __hash__ = lambda s: hash(4)\ndef f(x): return K()",
    "traces every line": "import sys\nsys.settrace(lambda *_: None)\nsys.setrecursionlimit(60)\ndef f(x): return 0",
    "replaces json": "import json, sys\njson.dumps = lambda *_, **__: '{\"value\": true}'\ndef f(x): return 0",
    "has threads that exit": "import threading, os\n"
    "for _ in range(20): threading.Thread(target=os._exit, args=(0,)).start()",
    "starts another program": "import os\nos.execvp('true', ['true'])",
}


ADD_STDIO = {"inputs": ["1 2\n", "3 4\n", "0 0\n"], "outputs": ["3\n", "7\n", "0\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


class TestStandardInputAndOutput:
    async def test_a_right_program(self, client):
        result = await scored(client, ADD, ADD_STDIO)
        assert result == {"score": 1.0, "acc": 1.0, "passed": 3, "total": 3, "verdict": "passed"}

    async def test_a_program_that_is_sometimes_right(self, client):
        result = await scored(client, ADD.replace("a + b", "a + 2"), ADD_STDIO)
        assert (result["score"], result["passed"], result["verdict"]) == (1 / 3, 1, "wrong_answer")
        result = await scored(client, ADD.replace("a + b", "a + 2"), ADD_STDIO, mode="all")
        assert (result["score"], result["acc"]) == (0.0, 0.0)

    @pytest.mark.parametrize(
        ("program", "verdict"),
        [
            ("1 / 0", "runtime_error"),
            ("raise SystemExit(1)", "runtime_error"),
            ("while True: pass", "timeout"),
            ("def f(:", "runtime_error"),
            ("print(", "runtime_error"),
            ("", "compile_error"),
            ("pass", "wrong_answer"),
            ("x = []\nwhile True: x.append(bytearray(1 << 20))", "runtime_error"),
        ],
    )
    async def test_ways_to_be_wrong(self, client, program, verdict):
        tests = {"inputs": [""], "outputs": ["1"]}
        result = await scored(client, program, tests, timeout=1, memory_limit_mb=128)
        assert (result["score"], result["verdict"]) == (0.0, verdict)

    async def test_another_language(self, client):
        result = await score_code("```bash\nread a b; echo $((a + b))\n```", ADD_STDIO, client=client, language="bash")
        assert result["score"] == 1.0

    async def test_a_large_output_is_compared_to_its_end(self, client):
        lines = [str(i) for i in range(300_000)]
        tests = {"inputs": [""], "outputs": ["\n".join(lines)]}
        assert (await scored(client, "for i in range(300000): print(i)", tests))["score"] == 1.0
        assert (await scored(client, "for i in range(300000): print(i if i != 150000 else 0)", tests))["score"] == 0.0


class TestFunctions:
    TESTS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}  # noqa: RUF012

    @pytest.mark.parametrize(
        "program",
        [
            "def add(a, b): return a + b",
            "class Solution:\n    def add(self, a, b):\n        return a + b",
            "def add(a, b):\n    print('noise')\n    return a + b",
            "def add(a, b): return a + b\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
        ],
    )
    async def test_right_ones(self, client, program):
        assert (await scored(client, program, self.TESTS))["score"] == 1.0

    @pytest.mark.parametrize(
        ("program", "verdict"),
        [
            ("def add(a, b): return a - b", "wrong_answer"),
            ("def sub(a, b): return a + b", "runtime_error"),
            ("def add(a, b): return add(a, b)", "runtime_error"),
            ("def add(a, b): pass", "wrong_answer"),
            ("def add(a, b):\n    while True: pass", "timeout"),
            ("raise ValueError", "runtime_error"),
        ],
    )
    async def test_wrong_ones(self, client, program, verdict):
        result = await scored(client, program, self.TESTS, timeout=1)
        assert (result["score"], result["verdict"]) == (0.0, verdict)

    async def test_arguments_as_lines_of_json(self, client):
        tests = {"fn_name": "f", "inputs": ['[1, 2]\n"x"', '[3]\n"y"'], "outputs": ['{"x": [1, 2]}', '{"y": [3]}']}
        assert (await scored(client, "def f(a, b): return {b: tuple(a)}", tests))["score"] == 1.0

    async def test_a_value_that_json_cannot_say_is_wrong(self, client):
        tests = {"fn_name": "f", "inputs": [[]], "outputs": [[1]]}
        assert (await scored(client, "def f(): return object()", tests))["verdict"] == "wrong_answer"
        assert (await scored(client, "def f(): return float('nan')", tests))["verdict"] == "wrong_answer"
        for hostile in (
            "10 ** 5000",
            "eval('[' * 90 + ']' * 90)",
            "'\\ud800'",
            "{1: {2}, 'x': (None,)}",
            "'a' * 10**6",
        ):
            assert (await scored(client, f"def f(): return {hostile}", tests))["score"] == 0.0

    async def test_a_problem_of_humaneval(self, client):
        file = SHARED / "data" / "humaneval"
        if not file.exists():
            pytest.skip("no shared data here")
        rows = [json.loads(line) for path in sorted(file.glob("*.jsonl")) for line in path.read_text().splitlines()]
        if not rows or "canonical_solution" not in rows[0]:
            pytest.skip("another format")
        row = rows[0]
        tests = {"assert_case": [f"{row['test']}\ncheck({row['entry_point']})"]}
        assert (await scored(client, row["prompt"] + row["canonical_solution"], tests))["score"] == 1.0
        assert (await scored(client, row["prompt"] + "    pass", tests))["score"] == 0.0


class TestAsserts:
    TESTS = {"assert_case": ["assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1"]}  # noqa: RUF012

    async def test_right_and_wrong(self, client):
        assert (await scored(client, "def f(x): return x * x", self.TESTS))["score"] == 1.0
        result = await scored(client, "def f(x): return x * 2", self.TESTS)
        assert (result["passed"], result["total"], result["verdict"]) == (1, 3, "runtime_error")

    async def test_the_solution_and_the_statement_share_no_process(self, client):
        """What a solution sees of the statement are the arguments."""
        tests = {"assert_case": ["import os\nassert f(os.getpid()) == 'another'"]}
        program = "import os\ndef f(pid):\n    return 'same' if os.getpid() == pid else 'another'"
        assert (await scored(client, program, tests))["score"] == 1.0

    @pytest.mark.parametrize("cheat", CHEATS)
    async def test_no_cheat_wins_a_single_case(self, client, cheat):
        result = await scored(client, CHEATS[cheat], TO_BE_CHEATED, timeout=1)
        assert (result["passed"], result["total"]) == (0, len(TO_BE_CHEATED["assert_case"]))

    async def test_the_cases_to_be_cheated_can_be_passed(self, client):
        assert (await scored(client, "import math\ndef f(x): return x * x", TO_BE_CHEATED))["score"] == 1.0

    @pytest.mark.parametrize(
        ("program", "statement"),
        [
            ("def f(*a): return list(a)", f"value = {EVERY_KIND}\nassert f(*value) == value"),
            ("def f(*a): return [type(each).__name__ for each in a]", f"v = {EVERY_KIND}\nassert f(*v) == f_(v)"),
            ("def f(x): return x", "assert repr(f(-0.0)) == '-0.0' and f(float('nan')) != f(float('nan'))"),
            ("def f(x, *, by=1): return x + by", "assert f(2, by=3) == 5 and f(2) == 3"),
            ("import numpy as np\ndef f(x): return np.int64(x), np.bool_(True)", "assert f(3) == (3, True)"),
            ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
            ("def f(n):\n    i = 0\n    while True:\n        yield i\n        i += n", "assert next(f(2)) == 0"),
            ("def f(n): return (i for i in range(n))", "assert list(f(3)) == [0, 1, 2] and f(3) != [0, 1, 2]"),
            ("def f(x): return lambda y: x + y", "assert f(1)(2) == 3"),
            ("def f(g, x): return [g(each) for each in x]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
            ("def f(key, x): return sorted(x, key=key)", "assert f(len, ['aa', 'b']) == ['b', 'aa']"),
            ("def f(x): return sum(x)", "assert f(iter([1, 2])) == 3 and f(range(4)) == 6"),
            ("def f(kind): return kind('3'), type(3)", "assert f(int) == (3, int)"),
            ("def f(x): return x[9]", "try:\n    f([1])\nexcept IndexError:\n    pass\nelse:\n    assert False"),
            ("def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
            ("def f(x, y): x.update(y)", "x = {}\nf(x, {1: [2]})\nassert x == {1: [2]}"),
            (
                "class N:\n    def __init__(self, v): self.v, self.next = v, None\n"
                "def f(n): return n.v + (f(n.next) if n.next else 0)",
                "n = N(1)\nn.next = N(2)\nassert f(n) == 3 and n.next.v == 2 and n.next is n.next",
            ),
            ("def sum(a, b): return a * b", "assert sum(2, 5) == 10"),
            ("import math\ndef f(x): return x", "assert math.isclose(f(0.1 + 0.2), 0.3)"),
            ("class queue: size = 3", "assert queue.size == 3"),  # of no module's making
            ("def f(x): yield x", "made = f(1)\nassert next(made) == 1 and next(made, None) is None and not [*made]"),
            ("count = 0\ndef f():\n    global count\n    count += 1\n    return count", "assert f() == 1 and f() == 2"),
        ],
    )
    async def test_what_crosses(self, client, program, statement):
        statement = "import datetime, decimal, fractions\nfrom collections import deque\n" + statement
        statement = statement.replace("f_(v)", "[type(each).__name__ for each in v]")
        result = await scored(client, program, {"assert_case": [statement]})
        assert (result["score"], result["verdict"]) == (1.0, "passed")

    @pytest.mark.parametrize(
        ("program", "statement"),
        [
            ("def f(x):\n    x.clear()\n    return x", "x = [2, 1]\nassert f(x) == sorted(x)"),
            ("def f(x): return x", "x = [2, 1]\nassert f(x) is x"),
            ("async def f(x): return x", "import asyncio\nassert asyncio.run(f(1)) == 1"),
            ("class math: isclose = lambda *_: True\ndef f(x): return 0", "assert math.isclose(f(2), 4.0)"),
            ("def f(x): raise StopIteration", "for got, want in zip(map(f, [1, 2]), [1, 4]):\n    assert got == want"),
            ("def f(x): raise StopIteration", "assert all(map(lambda pair: f(pair[0]) == pair[1], [(1, 1), (2, 4)]))"),
        ],
    )
    async def test_what_does_not_cross_is_not_passed(self, client, program, statement):
        assert (await scored(client, program, {"assert_case": [statement]}))["score"] == 0.0

    async def test_an_argument_that_cannot_cross_is_an_error_of_the_data(self, client):
        tests = {"assert_case": ["class Box:\n    pass\nassert f(Box())"]}
        with pytest.raises(DataError, match="Box"):
            await scored(client, "def f(x): return x", tests)

    async def test_the_solution_cannot_read_what_is_expected_of_a_function(self, client):
        cheat = (
            "import sys, os, gc, json\n"
            "def f(x):\n"
            "    for folder, _, files in os.walk('.'):\n"
            "        for name in files:\n"
            "            if '123456789' in open(os.path.join(folder, name), errors='replace').read(): return 123456789\n"
            "    for found in gc.get_objects():\n"
            "        if isinstance(found, dict) and '123456789' in repr(found.get('expected')): return 123456789\n"
            "    return 0"
        )
        tests = {"fn_name": "f", "inputs": [[1]], "outputs": [[123456789]]}
        assert (await scored(client, cheat, tests, timeout=10))["score"] == 0.0


class TestManyTests:
    async def test_a_fraction_is_of_the_first_ten(self, client):
        tests = {
            "inputs": [f"{i}" for i in range(30)],
            "outputs": [f"{i}" if i < 5 or i >= 10 else "no" for i in range(30)],
        }
        result = await scored(client, "print(input())", tests)
        assert (result["score"], result["total"]) == (0.5, 10)
        result = await scored(client, "print(input())", tests, max_cases=20)
        assert (result["score"], result["total"]) == (0.75, 20)

    async def test_all_or_nothing_is_of_all(self, client):
        tests = {"inputs": [f"{i}" for i in range(12)], "outputs": [f"{i}" for i in range(12)]}
        assert (await scored(client, "print(input())", tests, mode="all"))["total"] == 12
        tests["outputs"][11] = "no"
        assert (await scored(client, "print(input())", tests, mode="all"))["score"] == 0.0

    async def test_a_program_without_end_does_not_get_all_the_time_there_is(self):
        counting = Counting(RunResult(RunStatus.TIME_LIMIT, None, "", ""))
        tests = {"inputs": [""] * 100, "outputs": ["done"] * 100}
        result = await score_code("x", tests, client=counting, max_cases=100)
        assert (result["score"], result["verdict"]) == (0.0, "timeout")
        assert counting.runs < MAX_TIMEOUTS + code.CASES_AT_ONCE

    async def test_the_first_failure_is_enough_where_all_must_pass(self):
        counting = Counting(RunResult(RunStatus.FINISHED, 1, "", ""))
        tests = {"inputs": [""] * 100, "outputs": ["done"] * 100}
        assert (await score_code("x", tests, client=counting, mode="all"))["score"] == 0.0
        assert counting.runs <= code.CASES_AT_ONCE

    async def test_tests_run_beside_each_other(self):
        together = Together(code.CASES_AT_ONCE)
        tests = {"inputs": [""] * code.CASES_AT_ONCE, "outputs": ["done"] * code.CASES_AT_ONCE}
        result = await asyncio.wait_for(score_code("x", tests, client=together), 30)
        assert result["score"] == 1.0


class Together:
    """A sandbox that answers nobody before `n` are there."""

    def __init__(self, n):
        self.missing = n
        self.complete = asyncio.Event()

    async def run(self, request):
        self.missing -= 1
        if not self.missing:
            self.complete.set()
        await self.complete.wait()
        return RunResult(RunStatus.FINISHED, 0, "done", "")


class Counting:
    """A sandbox that always answers the same."""

    def __init__(self, answer):
        self.answer = answer
        self.runs = 0

    async def run(self, request):
        self.runs += 1
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_a_sandbox_that_fails_gives_no_score():
    with pytest.raises(InfrastructureError) as raised:
        await score_code("x", ADD_STDIO, client=Counting(SandboxError("no box")))
    assert is_infrastructure(raised.value)


class TestTheDefaultTable:
    @pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
    def test_verls_data_sources(self, source):
        assert source in SCORERS
        assert compute_score(source, fenced(ADD), json.dumps(ADD_STDIO))["score"] == 1.0

    @pytest.mark.parametrize("source", ["taco", "humaneval"])
    @pytest.mark.parametrize(
        "program",
        [
            "def f(xs: List[int]) -> Optional[int]:\n    return max(xs)",
            "class Solution:\n    def f(self, xs: List[int]) -> int:\n        return max(xs)\n\nf = Solution().f",
            "import numpy as np\n\ndef f(xs):\n    return np.max(xs)",
        ],
    )
    def test_a_function_names_types_and_may_return_numpys_numbers(self, source, program):
        calls = {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [2]}
        truth = calls if source == "taco" else {"assert_case": ["assert f([1, 2]) == 2"]}
        assert compute_score(source, fenced(program), truth)["score"] == 1.0
        assert compute_score(source, fenced(program.replace("max", "min")), truth)["score"] == 0.0

    def test_options_come_from_the_configuration(self):
        options = {"mode": "all", "timeout": 5, "max_cases": 2, "memory_limit_mb": 256}
        scorer = load_compute_score("etude.rewards.code", "compute_score", options)
        result = scorer(data_source="mine", solution_str=fenced(ADD), ground_truth=ADD_STDIO, extra_info={})
        assert (result["score"], result["total"]) == (1.0, 2)
        with pytest.raises(ConfigError, match=r"reward_kwargs\.speed"):
            load_compute_score("etude.rewards.code", "compute_score", {"speed": 1})

    def test_a_server_that_is_gone_is_infrastructure(self, monkeypatch):
        monkeypatch.setenv("ETUDE_SANDBOX_URL", "http://127.0.0.1:9")
        with pytest.raises(SandboxError):
            compute_score("taco", fenced(ADD), ADD_STDIO)

    @pytest.mark.parametrize(
        ("options", "message"), [({"mode": "some"}, "'fraction' or 'all'"), ({"language": "cobol"}, "cobol")]
    )
    def test_options_that_make_no_sense(self, options, message):
        with pytest.raises(ConfigError, match=message):
            code.compute_score("x", ADD_STDIO, **options)
        with pytest.raises(ConfigError, match="tests of functions are for Python"):
            code.compute_score("x", TestFunctions.TESTS, language="bash")


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        (ADD_STDIO | {"inputs": ["a"], "outputs": ["b"]}, [StdioCase("a", "b")]),
        ('{"inputs": ["a"], "outputs": ["b"]}', [StdioCase("a", "b")]),
        ({"inputs": [["a", "b"]], "outputs": [["c", 1]]}, [StdioCase("a\nb", "c\n1")]),
        ({"inputs": np.array(["a"]), "outputs": np.array(["b"])}, [StdioCase("a", "b")]),
        ({"fn_name": "f", "inputs": [[1, "x"]], "outputs": [[2]]}, [CallCase("f", [1, "x"], [2])]),
        ({"fn_name": "f", "inputs": ["1\n[2]"], "outputs": ["{}"]}, [CallCase("f", [1, [2]], {})]),
        ({"fn_name": "f", "inputs": ["[1,\n2]"], "outputs": ["word"]}, [CallCase("f", [[1, 2]], "word")]),
        ({"fn_name": "f", "inputs": [5], "outputs": [5]}, [CallCase("f", [5], 5)]),
        ({"fn_name": None, "inputs": ["5"], "outputs": ["5"]}, [StdioCase("5", "5")]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[]]}, [CallCase("f", [1], [])]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [""]}, [CallCase("f", [1], "")]),
        ({"inputs": ["1", "2"], "outputs": ["", 0]}, [StdioCase("1", ""), StdioCase("2", "0")]),
        (
            {"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, 2]},
            [CallCase("f", [1], None), CallCase("f", [2], 2)],
        ),
        ({"assert_case": "assert f()"}, [AssertCase("assert f()")]),
        ({"assert_case": ["assert f()", "assert g()"]}, [AssertCase("assert f()"), AssertCase("assert g()")]),
    ],
)
def test_forms_of_tests(tests, cases):
    assert read_cases(tests) == cases


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be a mapping or the JSON text of one, not a list"),
        (None, "not a NoneType"),
        ({}, "needs the lists 'inputs' and 'outputs'"),
        ({"inputs": "abc", "outputs": ["a"]}, "needs the lists"),
        ({"inputs": ["a"], "outputs": []}, "there are 1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "there is no test"),
        ({"inputs": ["1", "2"], "outputs": ["3", None]}, "output 1 is None"),
        ({"inputs": ["1", "2"], "outputs": [math.nan, "3"]}, "output 0 is nan"),
        ({"inputs": ["1", "2"], "outputs": ["", []]}, "all outputs are missing"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [None]}, "all outputs are missing"),
        ({"assert_case": []}, "there is no test"),
        ({"assert_case": [1]}, "must be a list of statements"),
        (
            {"assert_case": ["def check(candidate):\n    assert abs(candidate(1) - 2) < 1"]},
            "tests nothing.*check\\(NAME\\)",
        ),
        ({"assert_case": ["import math", "class Test:\n    def test(self):\n        assert f(1)"]}, "tests nothing"),
        ({"assert_case": ["class T: ...\nif __name__ == '__main__':\n    main()"]}, "tests nothing"),
        ({"fn_name": "os.system", "inputs": [[]], "outputs": [1]}, "must be the name of a function"),
        ({"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}, "are not JSON"),
    ],
)
def test_tests_that_make_no_sense_are_a_data_error(tests, message):
    with pytest.raises(DataError, match=message):
        read_cases(tests)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n``` then ```python\nb\n```", "b\n"),
        ("```python\na\n``` output: ```\n42\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ("```cpp\na\n```\n```cpp\nb\n```", "b\n"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"),
        ("```python\nunfinished", "unfinished"),
        ("print(1)", "print(1)"),
        ("``` ", ""),
        ("", ""),
    ],
)
def test_where_the_code_is(text, program):
    assert extract_code(text) == program


def test_the_names_in_long_tests_cost_little():
    cases = [AssertCase(f"assert f([{'1, ' * 700_000}'a \\' test']) == 1  # test")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert code.names_of(cases) == {"f"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5


@pytest.mark.parametrize(
    "after",
    [
        "print(f(3))",
        "def test_f():\n    assert f(1) == 2\n\ntest_f()",
        "def check(candidate):\n    assert candidate(1) == 2\n\ncheck(f)",
        "result = f(3)",
        "def test():\n    assert f(1) == 2\n\ntest()",
    ],
)
@pytest.mark.parametrize(
    "truth",
    [
        {
            "assert_case": [
                "METADATA = {'dataset': 'test'}  # test\ndef check(candidate):\n    assert candidate(1) == 2\ncheck(f)"
            ]
        },
        {"assert_case": ["def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"]},
        {"inputs": [[1]], "outputs": [2], "fn_name": "f"},
    ],
)
def test_an_example_of_its_use_is_not_the_solution(truth, after):
    solution = "def f(x):\n    return x + 1\n"
    draft = "def f(x):\n    return x\n"
    text = f"```python\n{draft}```\nBetter:\n```python\n{solution}```\nExample usage:\n```python\n{after}\n```"
    assert extract_code(text, read_cases(truth)) == solution


def test_a_program_reads_its_input():
    cases = read_cases({"inputs": ["1"], "outputs": ["2"]})
    text = "```python\nprint(int(input()) + 1)\n```\nFor example:\n```python\nprint(1 + 1)\n```"
    assert extract_code(text, cases) == "print(int(input()) + 1)\n"
    assert extract_code(text) == "print(1 + 1)\n"
    assert extract_code(text, read_cases({"inputs": [""], "outputs": ["2"]})) == "print(1 + 1)\n"


@given(st.text(st.characters(codec="utf-8", exclude_characters="`"), max_size=60))
def test_fenced_code_is_found_as_it_was(program):
    if "</think>" not in program:
        assert extract_code(f"text\n```python\n{program}\n```\nmore").rstrip("\n") == program.rstrip("\n")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n", "1", True),
        ("1  \n2\n\n", "1\n2", True),
        ("1\n\n2", "1\n2", False),
        ("a b", "a  b", True),
        ("A", "a", False),
        ("0.30000000000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("1", "1.0", True),
        ("100000000000001", "100000000000002", False),
        ("1000000000.0", "1000000007", False),
        ("1e18", "1000000000000000003", False),
        ("2.9999999999", "3", True),
        ("nan", "nan", True),
        ("inf", "1", False),
        ("inf", "1" + "0" * 320 + ".5", False),
        ("1e400", "2e400", False),
        ("-Infinity", "-inf", True),
        ("", "", True),
        ("x", "", False),
        ("1 2", "1 2 3", False),
        ("9" * 500, "9" * 499 + "8", False),
    ],
)
def test_when_two_outputs_agree(printed, expected, same):
    assert same_output(printed, expected) is same
    assert same_output(expected, printed) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (3, 3, True),
        (3, [3], True),
        ([3], [3], True),
        ([3], [[3]], True),
        (3.0, 3, True),
        (0.1 + 0.2, 0.3, True),
        (10**20, 10**20 + 1, False),
        (1e9, 10**9 + 7, False),
        (1e18, 10**18 + 3, False),
        (math.inf, 10**400, False),
        ("3", 3, False),
        (None, [None], True),
        ([1, 2], [2, 1], False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        (True, 1, True),
        (10**400, 1.5, False),
    ],
)
def test_when_two_values_agree(found, expected, same):
    assert same_value(found, expected) is same
