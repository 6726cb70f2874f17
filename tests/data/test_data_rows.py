"""The row contract: rows made elsewhere pass unchanged, and every fault names its row."""

import json
import re

import numpy as np
import pytest

from etude.data.rows import active_tools, check_row, question_of
from etude.errors import DataError

TOOLS = ("calculator", "search")


def a_row(**changes):
    row = {
        "data_source": "task",
        "prompt": [{"role": "user", "content": "Hi"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 3, "need_tools_kwargs": True, "tools_kwargs": {"search": {"create_kwargs": {"k": 1}}}},
    }
    return row | changes


def with_kwargs(tools_kwargs, **extra_info):
    return a_row(extra_info={"tools_kwargs": tools_kwargs, **extra_info})


def test_a_good_row_is_kept_whole():
    row = a_row(metadata=None, images=[b"png"])
    assert check_row(row, "f: row 0", TOOLS) == row


def test_a_search_r1_row_is_kept_whole():
    row = {
        "id": "train_0",
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Answer the given question."}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["2,718"]}},
        "extra_info": {"split": "train", "index": 0},
        "metadata": None,
    }
    assert check_row(row, "f: row 0", TOOLS) == row


def test_missing_objects_become_empty():
    row = a_row(extra_info=None, agent_name=None)
    del row["reward_model"]
    checked = check_row(row, "f: row 0", TOOLS)
    assert checked["extra_info"] == checked["reward_model"] == {}
    assert "agent_name" not in checked


def test_nulls_under_kwargs_mean_not_given():
    kwargs = {"calculator": None, "search": {"create_kwargs": {"a": None, "b": [{"c": None}]}, "execute_kwargs": None}}
    checked = check_row(
        with_kwargs(kwargs, interaction_kwargs={"name": "x", "y": None}, z=None), "f: row 0", TOOLS, interactions=["x"]
    )
    assert checked["extra_info"]["tools_kwargs"] == {"search": {"create_kwargs": {"b": [{}]}}}
    assert checked["extra_info"]["interaction_kwargs"] == {"name": "x"}
    assert checked["extra_info"]["z"] is None  # elsewhere a null stays what it is


def test_numpy_rows_become_plain():
    prompt = np.array([{"role": "user", "content": "Hi"}], dtype=object)
    checked = check_row(a_row(prompt=prompt, extra_info={"tool_selection": np.array(["search"])}), "f: row 0", TOOLS)
    assert checked["prompt"] == [{"role": "user", "content": "Hi"}]
    assert active_tools(checked, TOOLS) == ["search"]


def test_the_row_given_is_not_changed():
    kwargs = {"search": {"create_kwargs": {"a": None}}, "calculator": None}
    row = with_kwargs(kwargs)
    check_row(row, "f: row 0", TOOLS)
    check_row(row, "f: row 0", None)
    assert row["extra_info"]["tools_kwargs"] == {"search": {"create_kwargs": {"a": None}}, "calculator": None}


def test_tools_turned_off_leave_tool_settings_out():
    row = with_kwargs({"unknown": {}}, need_tools_kwargs=True)
    assert "tools_kwargs" not in check_row(row, "f: row 0", None)["extra_info"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        *((row, ["a", "b", "c"]) for row in ({}, {"extra_info": None}, {"extra_info": {"tool_selection": None}})),
        ({"extra_info": {"tool_selection": ["c", "a", "zzz"]}}, ["a", "c"]),
        ({"extra_info": {"tool_selection": []}}, []),
    ],
)
def test_active_tools_are_the_configured_in_their_order(row, expected):
    assert active_tools(row, ["a", "b", "c"]) == expected


def test_an_agent_loop_that_nobody_registered():
    row = a_row(agent_name="tool_agnet")
    assert check_row(row, "f: row 4", TOOLS)["agent_name"] == "tool_agnet"  # where the loops are not known
    with pytest.raises(DataError) as caught:
        check_row(row, "f: row 4", TOOLS, agent_loops=["env_agent", "tool_agent"])
    assert str(caught.value) == (
        "f: row 4: agent_name: unknown agent loop 'tool_agnet'; did you mean 'tool_agent'? (known: env_agent, tool_agent)"
    )
    assert check_row(a_row(), "f: row 4", TOOLS, agent_loops=[]) == a_row()


CALL = {"type": "function", "function": {"name": "search", "arguments": '{"q": [1, null]}'}}


def test_tool_calls_of_a_prompt_are_decoded():
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    checked = check_row(a_row(prompt=[message, {"role": "tool", "content": "x", "tool_calls": None}]), "f", TOOLS)
    first, second = checked["prompt"]
    assert first["content"] == ""
    assert first["tool_calls"][0]["function"] == {"name": "search", "arguments": {"q": [1, None]}}
    assert second == {"role": "tool", "content": "x"}


def one(message):
    return a_row(prompt=[{"role": "user", "content": "Hi"}, message])


def called_with(arguments):
    return one({"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": arguments}}]})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"promt": [], "data_source": "x"}, "no column 'prompt' (data.prompt_key); did you mean 'promt'?"),
        (a_row(prompt="Hi"), "prompt must be a non-empty list of {role, content} messages, got str"),
        (a_row(prompt=None), "prompt must be a non-empty list of {role, content} messages, got NoneType"),
        (a_row(prompt=[]), "got an empty list"),
        (one("Hi"), "prompt[1] must be a {role, content} message, got str"),
        (one({"role": "usr", "content": "x"}), "prompt[1] has the unknown role 'usr'; did you mean 'user'?"),
        (one({"content": "x"}), "prompt[1] has the unknown role None"),
        (one({"role": "user"}), "prompt[1] (user) needs 'content' as text, got NoneType"),
        (one({"role": "user", "content": []}), "needs 'content' as text, got list"),
        (one({"role": "user", "content": [{"type": "text"}]}), "a part of 'content' must be {type: text, text}"),
        (one({"role": "user", "content": ["x"]}), "or {type: image, image?}, got str"),
        (one({"role": "user", "content": [{"type": "image", "url": "a.png"}]}), "or {type: image, image?}, got image"),
        (one({"role": "assistant", "tool_calls": {"a": 1}}), "tool_calls must be a list, got dict"),
        (one({"role": "assistant", "tool_calls": ["x"]}), "tool_calls[0] must be {type: function"),
        (called_with("{"), "'arguments' is not valid JSON"),
        (called_with("[]"), "'arguments' must be an object, got list"),
        (a_row(data_source=None), "needs 'data_source'"),
        (a_row(agent_name=3), "agent_name must be text, got int"),
        (a_row(reward_model="1"), "reward_model must be an object, got str"),
        (a_row(extra_info=[1]), "extra_info must be an object, got list"),
        (with_kwargs(None, need_tools_kwargs=True), "need_tools_kwargs is true but extra_info.tools_kwargs is missing"),
        (with_kwargs({"search": None}, need_tools_kwargs=True), "need_tools_kwargs is true"),
        (with_kwargs(["search"]), "extra_info.tools_kwargs must be an object, got list"),
        (with_kwargs({}, interaction_kwargs="x"), "extra_info.interaction_kwargs must be an object, got str"),
        (with_kwargs({}, interaction_kwargs={"name": "x"}), "interaction 'x' (set multi_turn.interaction_config_path)"),
        (with_kwargs({"serch": {}}), "tools_kwargs names the tool 'serch'; did you mean 'search'?"),
        (with_kwargs({"search": 1}), "tools_kwargs.search must be an object, got int"),
        (with_kwargs({"search": {"create_kwarg": {}}}), "unknown key 'create_kwarg'; did you mean 'create_kwargs'?"),
        (with_kwargs({"search": {"create_kwargs": 1}}), "tools_kwargs.search.create_kwargs must be an object, got int"),
        (with_kwargs({"search": {}}, tool_selection=["calculator"]), "'search', which tool_selection leaves out"),
        (with_kwargs({}, tool_selection="search"), "extra_info.tool_selection must be a list of tool names"),
        (with_kwargs({}, tool_selection=[1]), "extra_info.tool_selection must be a list of tool names"),
        (
            with_kwargs({}, tool_selection=["search", "calculater"]),
            "tool_selection names the tool 'calculater'; did you mean 'calculator'? (configured: calculator, search)",
        ),
    ],
)
def test_every_fault_is_one_line_that_names_the_row(row, reason):
    with pytest.raises(DataError) as raised:
        check_row(row, "train.parquet: row 17", TOOLS)
    assert str(raised.value).startswith("train.parquet: row 17: ")
    assert reason in str(raised.value)


@pytest.mark.parametrize("column", ["answer", "solution"])
def test_a_row_of_trl_is_told_all_that_it_lacks_with_a_row_that_is_right(column):
    with pytest.raises(DataError) as raised:
        check_row({"prompt": "What is 2 + 3?", column: "5"}, "train.parquet: row 0", TOOLS)
    assert f"no data_source, and '{column}' where reward_model should be" in str(raised.value)
    worked = re.search(r"write (\{.*\}) \(", str(raised.value))[1]
    check_row(json.loads(worked), "the row that it shows", TOOLS)


def test_a_selection_is_not_judged_where_tools_are_turned_off():
    row = check_row(with_kwargs({}, tool_selection=["any"]), "f: row 0", None)
    assert active_tools(row, ["search"]) == []


@pytest.mark.parametrize(
    ("interactions", "expected"),
    [((), None), (["gsm8k"], "gsm8k"), (["weather", "gsm8k"], "gsm8k")],
)
def test_interaction_kwargs_without_a_name_are_those_of_gsm8k_or_of_nobody(interactions, expected):
    """As the rows of verl's scripts for tools carry them, which no run with tools alone can use."""
    kwargs = {"query": "How many?", "ground_truth": "72", "name": None}
    extra_info = check_row(with_kwargs({}, interaction_kwargs=kwargs), "f: row 0", TOOLS, interactions=interactions)[
        "extra_info"
    ]
    named = {"query": "How many?", "ground_truth": "72", "name": expected}
    assert extra_info.get("interaction_kwargs") == (named if expected else None)


def test_a_name_is_asked_for_where_none_can_be_meant():
    with pytest.raises(DataError, match="interaction_kwargs needs 'name'"):
        check_row(with_kwargs({}, interaction_kwargs={"topic": "x"}), "f: row 0", TOOLS, interactions=["weather"])


def test_without_any_tool_the_error_says_so():
    with pytest.raises(DataError, match=r"row 17: tools_kwargs names the tool 'search' \(no tool is configured\)"):
        check_row(a_row(), "train.parquet: row 17", ())


def test_rows_ask_the_same_where_neither_the_runs_agent_nor_its_environment_reads_more():
    """Such as pages of examples/note_taker, or the number of examples/bisection: the prompt is the same in all rows."""
    rows = [{"prompt": "Guess.", "extra_info": {"index": n, "number": n}} for n in (1, 2)]

    def alike(**own):
        return len({question_of(row, row["prompt"], **own) for row in rows}) == 1

    assert alike()
    assert alike(agent="tool_agent")
    assert not alike(agent="openai_agent")
    assert not alike(env="bisection")
