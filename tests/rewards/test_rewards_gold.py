"""Real data: the reference answer of every row earns the whole reward, another answer none, and so does what tools print."""

import asyncio
import concurrent.futures
import functools
import json
import re
from pathlib import Path

import pytest
from test_rewards_manager import Letters, trajectory

from etude.rewards import NaiveRewardManager, TrajectoryScorer, code, compute_score

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside this checkout")


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def score(source, text, truth):
    found = compute_score(source, text, truth)
    return found["score"] if isinstance(found, dict) else found


def gsm8k():
    for row in rows("gsm8k/test.jsonl"):
        truth = row["answer"].rpartition("####")[2].strip()
        yield "openai/gsm8k", row["answer"], truth, f"#### {truth}1"


def math500():
    for number, row in enumerate(rows("math500/test.jsonl")):
        truth = row["answer"]
        yield "HuggingFaceH4/MATH-500", row["solution"], truth, rf"\boxed{{{truth}+1}}"
        if number % 5:
            continue
        yield "numina_olympiads", rf"\boxed{{{truth}}}", truth, rf"\boxed{{7({truth})+0.123}}"
        yield "math_dapo", f"\nAnswer: ${truth}$", truth, f"Answer: ${truth}+2$"


def squad():
    for row in rows("squad_search/qa.jsonl"):
        first = row["golden_answers"][0] if "golden_answers" in row else row["answers"][0]
        truth = {"target": row.get("golden_answers") or row["answers"]}
        yield "searchR1_nq", f"<think>x</think><answer>{first}</answer>", truth, f"<answer>{first} zzz</answer>"


@pytest.mark.parametrize(("table", "count"), [(gsm8k, 1319), (math500, 700), (squad, 1000)])
def test_the_reference_answer_is_right_and_another_is_not(table, count):
    wrong = []
    found = list(table())
    assert len(found) >= count
    for source, gold, truth, other in found:
        if score(source, gold, truth) != 1.0:
            wrong.append(("gold", source, truth))
        if score(source, other, truth) > 0.0:
            wrong.append(("perturbed", source, truth))
        if score(source, "", truth) > 0.0:
            wrong.append(("empty", source, truth))
    assert wrong == []


def call_text(calls):
    return "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls)


def accepted(value):
    """One value that BFCL's nested tables of accepted values allow."""
    if isinstance(value, dict):
        lists = {key: each if isinstance(each, list) else [each] for key, each in value.items()}
        return {key: accepted(each[0]) for key, each in lists.items() if each and each[0] != ""}
    return [accepted(each) for each in value] if isinstance(value, list) else value


FILES = ["simple_python", "multiple", "parallel", "parallel_multiple"]
FILES += ["live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"]


@pytest.mark.parametrize("name", FILES)
def test_function_calls(name):
    wrong = []
    for row in rows(f"bfcl/{name}.jsonl"):
        truth, calls = row["ground_truth"], []
        for call in truth:
            ((function, values),) = call.items()
            calls.append((function, {key: accepted(each[0]) for key, each in values.items() if each and each[0] != ""}))
        for text, right in (
            (call_text(calls), 1.0),
            (call_text(reversed(calls)), 1.0),
            (call_text(calls[1:]), 0.0),
            (call_text([*calls, calls[0]]), 0.0),
            (call_text([(calls[0][0], calls[0][1] | {"zzz": 1}), *calls[1:]]), 0.0),
            (call_text([(calls[0][0] + "_", calls[0][1]), *calls[1:]]), 0.0),
        ):
            if score(f"bfcl_{name}", text, json.dumps(truth)) != right:
                wrong.append((row["id"], right, text))
    assert wrong == []


def fenced(text):
    return f"Here it is:\n```python\n{text}\n```"


def humaneval():
    for row in rows("humaneval/HumanEval.jsonl"):
        test = f"{row['test']}\ncheck({row['entry_point']})"
        yield row["entry_point"], row["prompt"] + row["canonical_solution"], {"assert_case": [test]}


def mbpp():
    for row in rows("mbpp/mbpp_sanitized.jsonl"):
        tests = "\n".join(
            ["import math", row.get("test_setup_code") or "", *row["test_list"]]
        )  # tests use math.isclose
        name = next(each for each in re.findall(r"def (\w+)", row["code"])[::-1] if each in tests)
        yield name, row["code"], {"assert_case": [tests]}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "table"), [("humaneval", humaneval), ("mbpp", mbpp)])
def test_reference_programs_pass_and_others_do_not(source, table, monkeypatch):
    patient = functools.partial(code.compute_score, timeout=100.0)  # some take seconds, and others run beside them
    monkeypatch.setattr(code, "compute_score", patient)

    def judge(numbered):
        number, (name, gold, truth) = numbered
        expected = "\n".join(re.findall(r"==\s*(.+)", "\n".join(truth["assert_case"])))
        others = {
            "empty": "",
            "prints": fenced(f"print({expected!r})"),
            "none": fenced(f"def {name}(*args, **kwargs):\n    return None"),
        }
        found = [("gold", name)] * (score(source, fenced(gold), truth) != 1.0)
        if number % 8:
            return found
        return found + [(kind, name) for kind, text in others.items() if score(source, text, truth) > 0.0]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        wrong = [each for found in threads.map(judge, enumerate(table())) for each in found]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "gold", "truth"),
    [
        ("openai/gsm8k", "#### 42", "42"),
        ("HuggingFaceH4/MATH-500", r"\boxed{42}", "42"),
        ("math_dapo", "Answer: 42", "42"),
        ("numina_cn_k12", r"\boxed{42}", "42"),
        ("searchR1_nq", "<answer>42</answer>", {"target": ["42"]}),
        ("hiyouga/geometry3k", r"<think>a</think>\boxed{42}", "42"),
        ("etude/pictures", "The answer is A.", "A"),
        ("etude/arithmetic", r"\boxed{42}", "42"),
        ("bfcl_simple", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [{"f": {"a": [1]}}]),
    ],
)
def test_what_a_tool_prints_earns_nothing(source, gold, truth):
    def total(*turns):
        made = trajectory(*turns)
        row = {"data_source": source, "reward_model": {"ground_truth": truth}}
        asyncio.run(TrajectoryScorer(NaiveRewardManager(Letters()))(made, row))
        return made.rewards.score

    assert total(("let me see", gold), ("done", "")) <= 0.0
    assert total(("let me see", ""), (gold, "")) >= 0.9
