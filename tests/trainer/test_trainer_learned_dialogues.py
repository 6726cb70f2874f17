"""The examples in which a tiny model learns from an environment, a user or an MCP server of the example's own: what their
demonstrations show is what these answer. That the model learns is in docs/."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import etude
from etude.agents.interactions import load_interactions
from etude.data import SFTDataset, read_rows
from etude.quickstart.example import find_example
from etude.quickstart.prepare import write_tables
from etude.registry import import_module
from etude.rewards import compute_score
from etude.schemas import FunctionCall
from etude.tools import ToolSession, load_tools
from etude.tools.mcp import close_connections

EXAMPLES = Path(etude.__file__).parents[1] / "examples"


def make(example, folder):
    """The example's test rows, and the messages of its demonstrations."""
    found = find_example(example)
    write_tables(found, folder, 1, replace(found.options.rows, demonstrations=60))
    shown = [row["messages"] for row in SFTDataset(str(folder / "data" / "demonstrations.parquet"))]
    return read_rows(folder / "data" / "test.parquet"), shown


def play(env, number, guess):
    """(guesses needed or made, the last reward) of a player who is given what is left and guesses."""
    text, _ = env.reset(options={"number": number})
    for turn in range(1, 7):
        low, high = (int(word.strip(".")) for word in text.split() if word.strip(".").isdigit())
        text, reward, terminated, truncated, _ = env.step(guess(low, high))
        if terminated or truncated:
            return turn, reward
    raise AssertionError("no end")


def test_halving_finds_every_number_and_bad_guesses_find_few():
    bisection = import_module(str(EXAMPLES / "bisection" / "agent.py"))
    numbers = range(1, bisection.HIGHEST + 1)
    halved = [play(bisection.Bisection(), number, lambda low, high: str((low + high) // 2)) for number in numbers]
    assert [reward for _, reward in halved] == pytest.approx([1.5 - 0.1 * turn for turn, _ in halved])
    assert max(turn for turn, _ in halved) == 5
    lowest = [play(bisection.Bisection(), number, lambda low, high: str(low)) for number in numbers]
    assert [reward > 0 for _, reward in lowest] == [number <= 5 for number in numbers]
    for nonsense in ("", "-3", "32", "²", "9" * 5000, "sixteen"):
        assert play(bisection.Bisection(), 7, lambda low, high, said=nonsense: said) == (5, 0.0)


def test_the_environment_answers_as_demonstrated(tmp_path):
    rows, shown = make("bisection", tmp_path)
    bisection = import_module(str(EXAMPLES / "bisection" / "agent.py"))
    assert {row["extra_info"]["number"] for row in rows} == set(range(1, bisection.HIGHEST + 1))
    for messages in shown:
        said, read = ([each["content"] for each in messages if each["role"] == role] for role in ("assistant", "user"))
        agreeing = [n for n in range(1, bisection.HIGHEST + 1) if episode(bisection.Bisection(), n, said) == read]
        assert agreeing  # some number of which every hint is true, and the episode ends with the last guess


def episode(env, number, guesses):
    """What the environment shows before each guess, where it ends with the last of them."""
    shown = [f"Guess.\n{env.reset(options={'number': number})[0]}"]
    for index, guess in enumerate(guesses):
        text, _, terminated, truncated, _ = env.step(guess)
        if (terminated or truncated) != (index == len(guesses) - 1):
            return None
        shown.append(text)
    return shown[:-1]


async def test_the_customer_answers_as_demonstrated(tmp_path):
    rows, shown = make("ask_first", tmp_path)
    [customer] = load_interactions(EXAMPLES / "ask_first" / "interaction.yaml").values()

    async def answer(row, said):
        given = {key: value for key, value in row["extra_info"]["interaction_kwargs"].items() if key != "name"}
        return (await customer.generate_response("one", [{"role": "assistant", "spoken": said}], **given))[:3]

    for row in rows[:40]:
        asked = row["extra_info"]["interaction_kwargs"]
        order, missing, detail = (asked[key] for key in ("order", "missing", "detail"))
        assert order == row["reward_model"]["ground_truth"]
        assert detail in order
        assert detail not in row["prompt"][-1]["content"]
        assert await answer(row, f"Which {missing}?") == (False, f"It is {detail}.", 0.0)
        assert await answer(row, "Which price?") == (False, "I said so.", 0.0)
        assert await answer(row, order) == (True, "", 1.0)
        assert await answer(row, order.replace(detail, "other")) == (True, "", 0.0)
    asking = [messages for messages in shown if len(messages) == 5]
    assert 10 < len(asking) < 50  # of 60: the others guess
    for _, wanted, question, told, order in asking:
        detail = told["content"].removeprefix("It is ").rstrip(".")
        assert question["content"] in ("Which colour?", "Which size?")
        assert detail in order["content"]
        assert set(order["content"].split()) == {*wanted["content"].rstrip(".").split()[3:], detail}


@pytest.mark.slow
async def test_the_catalogue_answers_as_demonstrated(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    rows, shown = make("two_calls", tmp_path)
    monkeypatch.setenv("CATALOGUE", str(tmp_path / "catalogue.json"))
    try:
        tools = {tool.name: tool for tool in load_tools(str(EXAMPLES / "two_calls" / "tools.yaml"))}
        async with ToolSession(tools, {}, request_id="example") as session:

            async def call(tool, **arguments):
                asked = FunctionCall(name=tool, arguments=json.dumps(arguments))
                return (await session.execute([asked], 0))[0].response.text

            for row in rows[:20]:
                name = row["prompt"][-1]["content"].removeprefix("Price of ").rstrip("?")
                found = await call("price", id=await call("find", name=name))
                assert [found] == row["reward_model"]["ground_truth"]["target"]
                assert compute_score(row["data_source"], f"<answer>{found}</answer>", {"target": [found]}) == 1.0
            assert await call("find", name="nothing") == await call("price", id="nothing") == "none"
    finally:
        close_connections()
    calling = [messages for messages in shown if len(messages) == 7]
    assert 10 < len(calling) < 50  # of 60: the others answer 0
    for _, question, find, number, price, found, answer in calling:
        first, second = (each["tool_calls"][0]["function"] for each in (find, price))
        assert (first["name"], second["name"]) == ("find", "price")
        assert question["content"] == f"Price of {first['arguments']['name']}?"
        assert second["arguments"]["id"] == number["content"]
        assert answer["content"] == f"<answer>{found['content']}</answer>"
    tested = {row["prompt"][-1]["content"] for row in rows}
    assert not any(messages[1]["content"] in tested for messages in shown)
