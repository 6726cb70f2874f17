"""A prompt is rendered once a row: its samples share the ids of the data set, where these are the prompt's."""

import asyncio
import copy

import pytest
from agents_stage import CHAT, QUESTION, SAMPLING, TOKENIZER, Echo, Recorder, context, says

from etude.agents import SingleTurnAgentLoop, ToolAgentLoop, TrajectoryClient
from etude.chat import ChatTemplate

ECHO = [Echo().get_openai_tool_schema().to_openai()]


class Counting(ChatTemplate):
    """Counts how often a prompt is rendered."""

    rendered = 0

    def initial_ids(self, messages, tools=None, image_tokens=()):
        self.rendered += 1
        return super().initial_ids(messages, tools, image_tokens)


def roll(loop_class, tools, **row):
    """(prompt ids, renderings) of a run on a row whose ids a data set has rendered with `row["shown"]`."""
    chat, shared = Counting(TOKENIZER), context(tools)
    shared = copy.copy(shared)
    object.__setattr__(shared, "chat", chat)
    known = CHAT.initial_ids(QUESTION, row.pop("shown", None))
    row = {"raw_prompt": QUESTION, "raw_prompt_ids": known, "request_id": "r"} | row

    async def main():
        client = TrajectoryClient(Recorder([says("5")]), "r")
        loop = loop_class(trainer_config=shared, server_manager=client, tokenizer=TOKENIZER, processor=None)
        return await loop.run(SAMPLING.params(0, 30, CHAT.stop_token_ids), **row)

    trajectory = asyncio.run(main())
    assert trajectory.prompt_ids is not known
    return trajectory.prompt_ids, chat.rendered


def own(name, **attributes):
    return type(name, (ToolAgentLoop,), attributes)


def test_the_ids_of_the_data_set_are_taken():
    shown = CHAT.initial_ids(QUESTION, ECHO)
    assert roll(ToolAgentLoop, [Echo()], shown=ECHO, active_tools=["echo"]) == (shown, 0)
    assert roll(SingleTurnAgentLoop, [], active_tools=[]) == (CHAT.initial_ids(QUESTION), 0)


GREETED = [QUESTION[0], {"role": "user", "content": f"{QUESTION[1]['content']}\nwelcome"}]


@pytest.mark.parametrize(
    ("loop_class", "tools", "row", "expected"),
    [
        (ToolAgentLoop, [Echo(greeting="welcome")], {"tools_kwargs": {"echo": {}}}, (GREETED, ECHO)),
        (SingleTurnAgentLoop, [Echo()], {}, (QUESTION, None)),  # which shows no tools
        (own("Own", tools={"echo": Echo()}), [Echo()], {}, (QUESTION, ECHO)),  # whose schema may be another
        (ToolAgentLoop, [Echo()], {"raw_prompt_ids": None}, (QUESTION, ECHO)),
        (ToolAgentLoop, [Echo()], {"active_tools": None}, (QUESTION, ECHO)),  # nobody says what the ids show
    ],
)
def test_another_prompt_than_the_data_sets_is_rendered(loop_class, tools, row, expected):
    if (given := {"shown": ECHO, "active_tools": ["echo"]} | row)["active_tools"] is None:
        del given["active_tools"]
    assert roll(loop_class, tools, **given) == (CHAT.initial_ids(*expected), 1)
