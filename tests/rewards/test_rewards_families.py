"""The scorers that REFERENCE names, one by one: what is right, what is not, and which data source asks them."""

import json
from types import SimpleNamespace

import pytest

from etude.errors import ConfigError, DataError
from etude.rewards import bfcl, compute_score, length, math_dapo, numina, overlong, repetition, search_r1, tags
from etude.rewards.default import SCORERS, scorer_of
from etude.trajectory import ToolCallRecord


@pytest.mark.parametrize(
    ("text", "score", "answer"),
    [
        ("so\nAnswer: 34", 1.0, "34"),
        ("so\nAnswer: $34$.", 1.0, "$34$."),
        (r"so" + "\n" + r"**Answer:** \boxed{34}", 1.0, "34"),
        ("Answer: 12\nAnswer: 34", 1.0, "34"),
        ("Answer: 34\nAnswer: 12", -1.0, "12"),
        ("Answer: 34 or 12", -1.0, "34 or 12"),
        ("34", -1.0, None),
        (r"\boxed{34}", -1.0, None),
        ("Answer: 34" + " " * 400, -1.0, None),
        ("", -1.0, None),
    ],
)
@pytest.mark.parametrize("source", ["math_dapo", "math", "math_dapo_reasoning", "aime2024", "aime_2025"])
def test_dapo_mathematics(source, text, score, answer):
    assert compute_score(source, text, "34") == {"score": score, "acc": float(score > 0), "pred": answer}


def test_dapo_mathematics_in_a_box():
    assert math_dapo.compute_score(r"Answer: 1, \boxed{34}", "34", strict_box=True)["score"] == 1.0
    assert math_dapo.compute_score("Answer: 34", "34", strict_box=True)["score"] == -1.0


@pytest.mark.parametrize("kind", ["aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads"])
def test_numina(kind):
    def score(text):
        return compute_score(f"numina_{kind}", text, r"\frac{1}{2}")["score"]

    assert score(r"So \boxed{0.5}.") == 1.0
    assert score("So the answer is $1/2$.") == 1.0
    assert score("Answer: 1/2") == 1.0
    assert score(r"<think>\boxed{0.5}</think> The answer is 3.") == 0.0
    assert score(r"The answer is 1/2, I mean \boxed{3") == 0.0
    assert score("0.5") == 0.0
    assert numina.extract_answer("") is None


SEARCHED = "<think>a</think><search>b</search><information>Paris is</information><think>c</think><answer>Rome</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (SEARCHED, 1.0),
        ("<answer>Rome</answer>", 1.0),
        ("<search>b</search> <search>c</search>\n<answer>Rome</answer>", 1.0),
        ("so <answer>Rome</answer>", 0.8),
        ("<think>a<answer>Rome</answer>", 0.8),
        (SEARCHED.replace("Rome", "Oslo"), 0.2),
        ("so <answer>Oslo</answer>", 0.1),
        ("<answer>Rome</answer> <answer>Oslo</answer>", 0.1),
        ("Rome", 0.0),
        ("<information>Rome</information>", 0.0),
        ("", 0.0),
    ],
)
def test_search_r1_with_its_form(text, score):
    assert search_r1.compute_score(text, {"target": ["Rome"]})["score"] == pytest.approx(score)


def test_search_r1_counts_what_was_found_only_beside_an_answer_in_form():
    seen = SimpleNamespace(tool_calls=[ToolCallRecord(0, "search", "{}", "The Rome of today")])
    options = {"trajectory": seen, "retrieval_score": 0.1}
    assert search_r1.compute_score("<answer>Oslo</answer>", ["Rome"], **options)["score"] == pytest.approx(0.3)
    assert search_r1.compute_score("Oslo", ["Rome"], **options)["score"] == 0.0
    assert search_r1.compute_score("<answer> </answer>", ["Rome"], **options)["score"] == pytest.approx(0.2)
    assert search_r1.compute_score("So <answer></answer>", ["Rome"])["score"] == 0.0  # an empty one is none
    assert search_r1.compute_score("<answer>Oslo</answer>", ["Bonn"], **options)["score"] == pytest.approx(0.2)


def test_search_r1_pays_nothing_for_information_that_the_model_wrote():
    text = "<search>x</search><information>Rome</information><answer>Oslo</answer>"
    seen = SimpleNamespace(tool_calls=[ToolCallRecord(0, "search", "{}", "nothing")])
    found = search_r1.compute_score(text, ["Rome"], trajectory=seen, retrieval_score=0.1)
    assert (found["retrieved"], found["score"]) == (0.0, pytest.approx(0.2))
    assert search_r1.compute_score(text, ["Rome"], retrieval_score=0.1)["retrieved"] == 1.0
    assert search_r1.compute_score("<information>" * 100_000, ["Rome"])["retrieved"] == 0.0  # in linear time


@pytest.mark.parametrize("arguments", ['{"query": "Is it Rome?"}', '{"query": "\\u0052ome"}', "Rome"])
def test_search_r1_does_not_pay_a_guess_that_the_tool_repeats(arguments):
    """Nor for what a later query for the same guess finds; what an earlier search found still counts."""
    echo = ToolCallRecord(0, "search", arguments, "Results for Rome: Rome is old")
    options = {"retrieval_score": 0.1, "trajectory": SimpleNamespace(tool_calls=[echo])}
    assert search_r1.compute_score("<answer>Oslo</answer>", ["Rome"], **options)["retrieved"] == 0.0
    options["trajectory"].tool_calls.insert(0, ToolCallRecord(0, "search", '{"query": "capital?"}', "It is Rome"))
    assert search_r1.compute_score("<answer>Oslo</answer>", ["Rome"], **options)["retrieved"] == 1.0
    text = "<search>Rome</search><information>Rome: no result</information>"
    assert search_r1.compute_score(f"{text}<answer>Oslo</answer>", ["Rome"])["retrieved"] == 0.0
    text = f"<search>capital</search><information>Rome</information>{text}"
    assert search_r1.compute_score(f"{text}<answer>Oslo</answer>", ["Rome"])["retrieved"] == 1.0


@pytest.mark.parametrize(
    ("query", "response", "truth", "retrieved"),
    [
        ("capital?", "It is so because of this", "us", False),
        ("capital?", "The Snowy Mountains", "no", False),
        ("who died?", "It was Ed.", "Ed", True),
        ("capital?", "Rome's walls", "Rome", True),
        ("capital?", "Beijing–Tianjin", "Tianjin", True),
        ("首都？", "北京市很大。", "北京", True),
        ("几年？", "1998、2002年", "2002", True),
        ("수도?", "서울은 크다", "서울", True),
        ("北京大吗？", "未找到：北京大吗？", "北京", False),
        ("New\nYork", "nothing for New\nYork", "New York", False),
        (["New", "York"], "nothing for New York", "New York", False),
        ({"year": 1990}, "nothing for 1990", "1990", False),
    ],
)
def test_search_r1_finds_whole_words_that_were_not_asked_for(query, response, truth, retrieved):
    call = ToolCallRecord(0, "search", json.dumps({"query": query}), response)
    found = search_r1.compute_score("<answer>x</answer>", [truth], SimpleNamespace(tool_calls=[call]))
    assert found["retrieved"] == retrieved


RESULT = {"result": "Doc 1 (Title: Italy)\nRome is its capital.\nIt is old. Sì."}  # as the tool `search` writes it


@pytest.mark.parametrize(
    "response",
    [
        json.dumps(RESULT),
        json.dumps(RESULT)[:-20] + "...(truncated)...",
        json.dumps([{"content": "Italy:\nRome"}]),
        json.dumps({"Rome": 1}),
    ],
)
def test_search_r1_finds_an_answer_that_begins_a_line_of_json(response):
    """Its line break, `\\n` in JSON, made it `nRome`: a search that found the answer was told that it had not."""
    call = ToolCallRecord(0, "search", '{"query_list": ["capital?"]}', response)
    found = search_r1.compute_score("<answer>x</answer>", ["Rome"], SimpleNamespace(tool_calls=[call]))
    assert found["retrieved"] == 1.0
    assert (
        search_r1.compute_score("<answer>x</answer>", ["nRome"], SimpleNamespace(tool_calls=[call]))["retrieved"] == 0.0
    )


def test_forms():
    assert tags.compute_score("<think>a</think>\n<answer>b</answer>\n") == 1.0
    for wrong in (
        "<answer>b</answer>",
        "x<think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer>!",
        "<answer>b</answer><think>a</think>",
        "<think><answer></think></answer>",
        "<think></think><think></think><answer></answer>",
        "",
    ):
        assert tags.compute_score(wrong) == 0.0
    assert tags.compute_score("<plan>x</plan>", tags=["plan"]) == 1.0
    assert tags.count_tags("<think>a</think><answer>") == 0.75
    assert tags.count_tags("<think><think>") == 0.0


def test_penalties():
    def tokens(count, sampled=None):
        return SimpleNamespace(response_tokens=count, sampled_tokens=count if sampled is None else sampled)

    found = [overlong.compute_score(tokens(n), max_tokens=100, buffer=20, factor=2.0) for n in (0, 80, 90, 100)]
    assert found == [0.0, 0.0, -1.0, -2.0]
    assert length.compute_score(tokens(150, 100), target_tokens=100, alpha=0.01) == 0.0
    assert length.compute_score(tokens(0, 150), target_tokens=100, alpha=0.01) == -0.5
    assert length.compute_score(tokens(0, 50), target_tokens=100, alpha=0.01, mode="exact") == -0.5
    assert length.compute_score(tokens(0, 10**6), target_tokens=1) == -1.0
    with pytest.raises(ConfigError, match="'max' or 'exact'"):
        length.compute_score(tokens(1), target_tokens=1, mode="min")
    assert repetition.compute_score("one two three four five") == 0.0
    assert repetition.compute_score("a b c d " * 10, ngram=4) == pytest.approx(-(1 - 4 / 37))
    assert repetition.compute_score("short") == 0.0
    assert repetition.compute_score("很好" * 20) == pytest.approx(-(1 - 2 / 37))
    assert repetition.compute_score("東京タワーへ行った。") == repetition.compute_score("很好 good 很好") == 0.0


@pytest.mark.parametrize(
    "score",
    [
        lambda seen: length.compute_score(seen, target_tokens=1, alpha=-1.0),
        lambda seen: overlong.compute_score(seen, max_tokens=100, buffer=0),
        lambda seen: overlong.compute_score(seen, max_tokens=100, buffer=-10),
        lambda seen: overlong.compute_score(seen, max_tokens=100, buffer=200),
        lambda seen: overlong.compute_score(seen, max_tokens=100, buffer=20, factor=-1.0),
        lambda seen: repetition.compute_score("a b", ngram=0),
        lambda seen: repetition.compute_score("a b", max_penalty=-1.0),
    ],
)
def test_a_penalty_that_would_pay_or_never_cost_is_refused(score):
    with pytest.raises(ConfigError, match=r"penalty's .* must be"):
        score(SimpleNamespace(response_tokens=120, sampled_tokens=120))


TRIANGLE = [{"area.triangle": {"base": [10], "height": [5, 5.0], "unit": ["units", ""]}}]


def said(*calls):
    return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("[area.triangle(base=10, height=5)]", 1.0),
        ("```python\n[area.triangle(base=10, height=5.0, unit='Units')]\n```", 1.0),
        (said(("area_triangle", {"height": 5, "base": 10})), 1.0),
        ('{"name": "area.triangle", "parameters": {"base": 10, "height": 5}}', 1.0),
        ("[area.triangle(base=10)]", 0.0),
        ("[area.triangle(base=10.0, height=5)]", 0.0),
        ("[area.triangle(base='10', height=5)]", 0.0),
        ("[area.triangle(base=True, height=5)]", 0.0),
        ("[area.triangle(base=10, height=5, colour='red')]", 0.0),
        ("[area.triangle(base=10, height=5), area.triangle(base=10, height=5)]", 0.0),
        ("[area.circle(base=10, height=5)]", 0.0),
        (said(("area_triangle", {"height": 5, "base": 10})) + "<tool_call>{</tool_call>", 0.0),
        ("area.triangle(base=10, height=5)", 1.0),  # as on the leaderboard, which adds the brackets
        ("", 0.0),
    ],
)
def test_function_calls(text, score):
    assert compute_score("bfcl_simple", text, json.dumps(TRIANGLE))["score"] == score


def test_function_calls_in_any_order_and_nested_values():
    wanted = [{"f": {"a": [[1, 2], [3]]}}, {"f": {"a": [{"k": ["x"], "l": [2, ""]}]}}]
    assert bfcl.compute_score("[f(a={'k': 'X'}), f(a=[1, 2])]", wanted)["acc"] == 1.0
    assert bfcl.compute_score("[f(a={'k': 'X'}), f(a=[2, 1])]", wanted) == {
        "score": 0.0,
        "acc": 0.0,
        "matched": 1,
        "calls": 2,
    }


def test_no_call_any_call_and_calls_written_as_python():
    assert bfcl.compute_score("I cannot do that.", [])["score"] == 1.0
    assert bfcl.compute_score("[f(a=1)]", [])["score"] == 0.0
    assert bfcl.compute_score("[f(a=1)]", "any")["score"] == 1.0
    assert bfcl.compute_score("no", "any")["score"] == 0.0
    assert bfcl.compute_score("<tool_call>{broken</tool_call>", "any")["score"] == 0.0  # no call
    assert bfcl.compute_score("[cd(folder='x'), sort(name='f')]", [["cd(folder='x')"], ["sort('f')"]])["score"] == 1.0
    assert bfcl.compute_score("[cd(folder='x'), sort(name='g')]", [["cd(folder='x')"], ["sort('f')"]])["score"] == 0.0


def test_function_calls_that_the_loop_read_come_before_the_text():
    seen = SimpleNamespace(tool_calls=[ToolCallRecord(0, "area.triangle", '{"base": 10, "height": 5}', "25")])
    assert compute_score("bfcl", "[nothing(a=1)]", TRIANGLE, {}, seen)["score"] == 1.0
    broken = SimpleNamespace(tool_calls=[ToolCallRecord(0, "area.triangle", "[" * 100_000, "")])
    assert compute_score("bfcl", "", TRIANGLE, {}, broken)["score"] == 0.0


@pytest.mark.parametrize("wrong", ["{", "3", [3], [{"f": {"a": 1}}], [{"f": {}, "g": {}}], ["f(a=open('x'))"], ["1+1"]])
def test_a_ground_truth_that_is_no_list_of_calls(wrong):
    with pytest.raises(DataError, match="ground_truth of function calls"):
        bfcl.compute_score("x", wrong)


def test_every_data_source_has_its_scorer():
    assert scorer_of("aime2030") is math_dapo.compute_score
    assert scorer_of("bfcl_live_multiple") is bfcl.compute_score
    assert {"humaneval", "mbpp", "numina_olympiads", "math_dapo"} <= set(SCORERS.names())
    with pytest.raises(ConfigError, match=r"aime\*"):
        scorer_of("amie2024")
