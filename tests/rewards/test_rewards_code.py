"""The reward for code: verl's forms of tests, what counts as right, ways to cheat, and a sandbox that fails."""

import asyncio
import json
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

    @pytest.mark.parametrize(
        "cheat",
        [
            "import sys; sys.exit(0)",
            "import os; os._exit(0)",
            "raise SystemExit",
            "def f(x):\n    import os; os._exit(0)",
            "def f(x):\n    import sys; sys.exit(0)",
            "import sys, json; print(json.dumps(None)); sys.exit(0)",
            "import os\nif os.fork() == 0: pass\nelse: os._exit(0)",
            "import threading, os\nthreading.Timer(0.05, lambda: os._exit(0)).start()\ndef f(x):\n    while True: pass",
        ],
    )
    async def test_ending_early_is_no_way_to_pass(self, client, cheat):
        result = await scored(client, cheat, self.TESTS, timeout=2)
        assert result["score"] == 0.0

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
        tests = {"inputs": [""] * 100, "outputs": [""] * 100}
        result = await score_code("x", tests, client=counting, max_cases=100)
        assert (result["score"], result["verdict"]) == (0.0, "timeout")
        assert counting.runs < MAX_TIMEOUTS + code.CASES_AT_ONCE

    async def test_the_first_failure_is_enough_where_all_must_pass(self):
        counting = Counting(RunResult(RunStatus.FINISHED, 1, "", ""))
        tests = {"inputs": [""] * 100, "outputs": [""] * 100}
        assert (await score_code("x", tests, client=counting, mode="all"))["score"] == 0.0
        assert counting.runs <= code.CASES_AT_ONCE

    async def test_tests_run_beside_each_other(self):
        together = Together(code.CASES_AT_ONCE)
        tests = {"inputs": [""] * code.CASES_AT_ONCE, "outputs": [""] * code.CASES_AT_ONCE}
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
        return RunResult(RunStatus.FINISHED, 0, "", "")


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
        ({"assert_case": []}, "there is no test"),
        ({"assert_case": [1]}, "must be a list of statements"),
        ({"fn_name": "os.system", "inputs": [[]], "outputs": [[]]}, "must be the name of a function"),
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
        ("nan", "nan", True),
        ("inf", "1", False),
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
