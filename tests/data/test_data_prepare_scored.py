"""Prepared maths, programs and function calls: rows pass the contract, the gold answer scores 1, another one does not."""

import ast
import hashlib
import json
import re
from pathlib import Path

import pytest
from data_stage import invoke, lines

from etude.data import check_row, read_rows
from etude.data.prepare import bfcl, gsm8k, programs
from etude.data.prepare.sources import fetch_inputs
from etude.errors import DataError
from etude.rewards import compute_score

DATA = Path(__file__).parents[3] / "shared" / "data"
shared = pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside this checkout")
TOOLS = ["code_interpreter", "calc_gsm8k_reward", "search"]


def prepared(tmp_path, name, source, *options):
    invoke(name, "--input", source, "--out", tmp_path / "out", *options)
    return read_rows(tmp_path / "out" / f"{Path(source).stem}.parquet")


def truth(row):
    return row["reward_model"]["ground_truth"]


def score(row, answer):
    found = compute_score(row["data_source"], answer, truth(row))
    return found["score"] if isinstance(found, dict) else found


@shared
def test_math_500(tmp_path):
    rows = prepared(tmp_path, "math", DATA / "math500" / "test.jsonl")
    given = [json.loads(line) for line in (DATA / "math500" / "test.jsonl").read_text().splitlines()]
    assert [truth(row) for row in rows] == [each["answer"] for each in given]
    for row, each in zip(rows, given):
        assert check_row(row, "x", TOOLS)["prompt"][0]["content"].startswith(each["problem"])
        assert row["extra_info"]["subject"] == each["subject"]
        assert "tools_kwargs" not in row["extra_info"]
        assert each["solution"] not in str(row)
    for row in rows[:20]:
        assert score(row, f"so \\boxed{{{truth(row)}}}") == 1.0
        assert score(row, "so \\boxed{87654321}") == 0.0


def test_maths_answer_is_that_of_the_solution_where_none_is_given(tmp_path):
    source = lines(
        tmp_path / "train.jsonl",
        {"problem": "2+3?", "solution": "It is \\boxed{4}, no: $\\boxed{\\frac{10}{2}}$.", "type": "Algebra"},
        {"problem": "x?", "solution": "\\boxed{1}", "answer": "\\boxed{7}"},
        {"problem": "y?", "solution": "9", "answer": "9"},
        {"question": "y?", "answer": 12},
    )
    rows = prepared(tmp_path, "math", source, "--code")
    assert [truth(row) for row in rows] == ["\\frac{10}{2}", "7", "9", "12"]
    assert rows[0]["extra_info"]["tools_kwargs"]["code_interpreter"]["create_kwargs"]["ground_truth"] == "\\frac{10}{2}"
    assert "code_interpreter" in rows[0]["prompt"][0]["content"]
    lines(source, {"problem": "2+3?", "solution": "It is 5."})
    with pytest.raises(DataError, match=re.escape(f"{source}:1: no answer")):
        prepared(tmp_path, "math", source)


def test_dapo_in_verls_form_and_raw(tmp_path):
    source = lines(
        tmp_path / "train.jsonl",
        {
            "prompt": [{"role": "user", "content": "What is 6*7?"}],
            "reward_model": {"ground_truth": "42", "style": "rule"},
        },
        {"problem": "What is 1/2 + 1/3?", "answer": "\\frac{5}{6}"},
    )
    rows = prepared(tmp_path, "dapo", source)
    assert [truth(row) for row in rows] == ["42", "\\frac{5}{6}"]
    assert all(row["data_source"] == "math_dapo" for row in rows)
    assert score(rows[0], "So.\nAnswer: 42") == 1.0
    assert score(rows[0], "So.\nAnswer: 41") == -1.0
    assert score(rows[1], "Answer: 5/6") == 1.0


@shared
def test_gsm8k_with_the_code_interpreter(tmp_path):
    invoke("gsm8k", "--input", DATA / "gsm8k" / "test.jsonl", "--out", tmp_path, "--tool", "code_interpreter")
    rows = read_rows(tmp_path / "test.parquet")
    assert len(rows) == 1319
    for row in rows[:50]:
        assert list(check_row(row, "x", TOOLS)["extra_info"]["tools_kwargs"]) == ["code_interpreter"]
        assert "`code_interpreter`" in row["prompt"][0]["content"]
        assert gsm8k.TOOL not in row["prompt"][0]["content"]
        assert score(row, f"#### {truth(row)}") == 1.0


@shared
@pytest.mark.parametrize(
    ("name", "source", "count"), [("humaneval", "HumanEval", 164), ("mbpp", "mbpp_sanitized", 427)]
)
def test_programs_name_the_function_and_no_test_that_is_scored(tmp_path, name, source, count):
    rows = prepared(tmp_path, name, DATA / name / f"{source}.jsonl")
    given = [json.loads(line) for line in (DATA / name / f"{source}.jsonl").read_text().splitlines()]
    assert len(rows) == count
    for row, each in zip(rows, given):
        text = check_row(row, "x", TOOLS)["prompt"][0]["content"]
        solution = each["code"] if name == "mbpp" else each["prompt"] + each["canonical_solution"]
        named = {
            node.name for node in ast.walk(ast.parse(solution)) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        called = re.search(r"is called `(\w+)`", text)[1] if name == "mbpp" else each["entry_point"]
        assert called in named, each["task_id"]
        assert not any(line.strip() in text for line in each.get("test_list", [])), each["task_id"]
        assert json.loads(truth(row))["assert_case"]


def test_a_helper_of_a_humaneval_prompt_belongs_to_the_test():
    prompt = 'import math\n\ndef twice(x):\n    return 2 * x\n\n\ndef half(x):\n    """Reverses twice."""\n'
    test = "def check(candidate):\n    assert twice(candidate(3)) == 3"
    row = programs.humaneval_row(False, {"prompt": prompt, "test": test, "entry_point": "half"}, "x", "test", 0)
    assert score(row, "```python\ndef half(x): return x / 2\n```") == 1.0
    assert score(row, "```python\ndef half(x): return 0\ndef twice(x): return 3\n```") == 0.0
    alone = programs.humaneval_row(False, {"prompt": prompt[40:], "test": test, "entry_point": "half"}, "x", "test", 0)
    assert "import" not in truth(alone)


@shared
@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), [("humaneval", "HumanEval"), ("mbpp", "mbpp_sanitized")])
def test_reference_programs_pass_in_the_sandbox(tmp_path, name, source):
    rows = prepared(tmp_path, name, DATA / name / f"{source}.jsonl")
    given = [json.loads(line) for line in (DATA / name / f"{source}.jsonl").read_text().splitlines()]
    for number in (0, 5, 40):
        each = given[number]
        solution = each["code"] if name == "mbpp" else each["prompt"] + each["canonical_solution"]
        assert score(rows[number], f"```python\n{solution}\n```") == 1.0
        assert score(rows[number], "```python\npass\n```") == 0.0


def test_mbpp_without_tests_or_with_broken_ones_names_its_row(tmp_path):
    source = lines(tmp_path / "mbpp.jsonl", {"text": "Add.", "code": "def f(): pass", "test_list": []})
    with pytest.raises(DataError, match=f"{source}:1: needs 'test_list'"):
        prepared(tmp_path, "mbpp", source)
    assert programs._called("assert set(sum((1, 2), g(3))) == {1}", "def g(): 1\ndef sum(): 2", "x") == "sum"
    for test in ("assert (", "assert len('x') == 1"):
        with pytest.raises(DataError, match=r"x: the test"):
            programs._called(test, "def f(): 1", "x")


@shared
@pytest.mark.parametrize(
    "name",
    ["simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_relevance"],
)
def test_bfcl(tmp_path, name):
    rows = prepared(tmp_path, "bfcl", DATA / "bfcl" / f"{name}.jsonl")
    for row in rows:
        assert check_row(row, "x", [])["data_source"] == f"bfcl_{name}"
        schemas = json.loads(row["prompt"][0]["content"].rpartition("Functions as JSON:\n")[2])
        assert all(schema["parameters"]["type"] == "object" for schema in schemas)
        wanted = truth(row)
        if row["extra_info"]["id"] in ("live_simple_106-63-0", "live_simple_112-68-0"):
            assert ": []" in wanted  # arguments for which BFCL accepts no value: nothing is right
            continue
        assert score(row, gold_calls(wanted if wanted == "any" else json.loads(wanted))) == 1.0
        assert score(row, "[no_such_function()]" if name != "live_relevance" else "I cannot.") == 0.0


def gold_calls(calls):
    """The accepted calls as a model would write them."""
    if calls == []:
        return "None of these functions helps."
    if calls == "any":
        return "[anything(a=1)]"
    written = []
    for call in calls:
        [(name, arguments)] = call.items()
        given = ", ".join(f"{key}={plain(values[0])!r}" for key, values in arguments.items() if values[0] != "")
        written.append(f"{name}({given})")
    return f"[{', '.join(written)}]"


def plain(value):
    """The first accepted value of everything inside."""
    if isinstance(value, dict):
        return {
            key: plain(values[0]) if isinstance(values, list) else plain(values)
            for key, values in value.items()
            if values != [""]
        }
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("turn", [{"role": "user", "content": "x"}, [{"role": "user"}], ["x"], 5])
def test_bfcls_turns_are_lists_of_messages(turn):
    with pytest.raises(DataError, match="x: a turn of 'question' must be a list of messages"):
        bfcl.make_row({"question": [turn], "function": [{}], "ground_truth": []}, "x", "simple", 0)


@shared
def test_bfcls_turns_need_its_simulators():
    example = json.loads((DATA / "bfcl" / "multi_turn_base.jsonl").read_text().splitlines()[0])
    with pytest.raises(DataError, match="x: "):
        bfcl.make_row({**example, "function": [{}]}, "x", "multi_turn_base", 0)
    with pytest.raises(DataError, match="needs 'ground_truth'"):
        bfcl.make_row({"question": [[]], "function": [{}]}, "x", "simple", 0)


def test_schemas_speak_json_schema():
    given = {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "tuple", "items": {"type": "any"}}}}
    assert bfcl.json_schema(given) == {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "array", "items": {}}},
    }


# -- what every command leaves -------------------------------------------------------------------------------------


def test_the_data_card_is_the_same_each_time(tmp_path):
    (tmp_path / "LICENSE").write_text("\nMIT License\n\nwhatever")
    source = lines(tmp_path / "test.jsonl", {"problem": "2+3?", "answer": "5"})
    output = invoke("math", "--input", source, "--out", tmp_path / "out", "--code").output
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{tmp_path}/out/README.md" in output
    assert f"`etude data math --input {source} --output-dir {tmp_path}/out --code`" in card
    assert "Licence of the source: MIT License (LICENSE)." in card
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    assert (
        f"| test.parquet | 1 | {len(files['test.parquet'])} | `{hashlib.sha256(files['test.parquet']).hexdigest()}` |"
        in card
    )
    assert f"| test.jsonl | {source.stat().st_size} | `{hashlib.sha256(source.read_bytes()).hexdigest()}` |" in card
    assert "| reward_model | `struct<style: string, ground_truth: string>` |" in card
    invoke("math", "--input", source, "--out", tmp_path / "out", "--code")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files


def test_a_readme_of_ones_own_is_left_alone(tmp_path):
    source = lines(tmp_path / "test.jsonl", {"problem": "2+3?", "answer": "5"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    output = invoke("math", "--input", source, "--out", tmp_path / "out").output
    assert "no data card" in output
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


def test_a_folder_is_its_files(tmp_path):
    (tmp_path / "in").mkdir()
    for split in ("train", "test"):
        lines(tmp_path / "in" / f"{split}.jsonl", {"problem": split, "answer": "5"})
    invoke("math", "--input", tmp_path / "in", "--out", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.parquet")) == ["test.parquet", "train.parquet"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no file"):
        invoke("math", "--input", tmp_path / "none", "--out", tmp_path / "out")


def test_a_data_set_of_the_hub_comes_from_its_cache_or_is_one_line(tmp_path, monkeypatch):
    """Without a network: the hub's own client, and the folder in which it keeps what it has fetched."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    revision = "0" * 40
    folder = tmp_path / "datasets--someone--maths" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(revision)
    lines(folder / "test.jsonl", {"problem": "2+3?", "answer": "5"})
    [found] = fetch_inputs(["hub:someone/maths"])
    assert (found / "test.jsonl").is_file()
    with pytest.raises(DataError, match="hub:someone/else: cannot be fetched"):
        fetch_inputs(["hub:someone/else"])
