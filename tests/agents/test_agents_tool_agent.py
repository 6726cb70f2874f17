"""The tool agent, state by state and ending by ending: what the engine is asked with, what counts, what is trained on."""

import pytest
from agents_stage import CHAT, QUESTION, TOKENIZER, Echo, call, encode, roll, says
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents import SingleTurnAgentLoop, ToolAgentLoop
from etude.agents.tool_messages import LEAST_TOKENS, shorten_texts
from etude.chat import ParsedResponse, ToolParser
from etude.checks.step_warnings import find_evidence, find_problems
from etude.errors import DataError
from etude.schemas import FunctionCall
from etude.tools import TokenLimit, ToolResponse
from etude.trainer.metrics import tool_metrics
from etude.trainer.rollouts import failure_metrics
from etude.trajectory import Provenance, Rollout, StopReason

SAMPLED = Provenance.SAMPLED


def texts_of(trajectory, provenance):
    return [TOKENIZER.decode(s.token_ids) for s in trajectory.segments if s.provenance is provenance]


# -- endings -----------------------------------------------------------------------------------------------------


def test_an_answer_without_a_call_completes():
    trajectory, engine = roll([says("5")], [Echo()])
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert (trajectory.assistant_turns, trajectory.user_turns, trajectory.num_turns) == (1, 0, 2)
    assert trajectory.response_ids == says("5")
    assert trajectory.prompt_ids == engine.asked[0][1]
    assert trajectory.messages[-1] == {"role": "assistant", "content": "5"}


def test_a_call_is_answered_and_the_model_goes_on():
    tool = Echo()
    trajectory, engine = roll([says(call(text="hello")), says("5")], [tool])
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert (trajectory.assistant_turns, trajectory.user_turns) == (2, 1)
    whole = [*QUESTION, {"role": "assistant", "content": call(text="hello")}, {"role": "tool", "content": "hello"}]
    schemas = [tool.get_openai_tool_schema().to_openai()]
    assert engine.asked[1][1] == CHAT.initial_ids(whole, schemas)  # the template's own rendering, id for id
    assert [r.response for r in trajectory.tool_calls] == ["hello"]
    assert tool.log == {"create": 1, "execute": 1, "calc_reward": 1, "release": 1}
    assert [event for event, _ in tool.events] == ["create", "execute", "calc_reward", "release"]
    assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]


def test_the_last_assistant_turn_may_still_use_its_tools():
    tool = Echo(reward=0.5, final=1.0)
    trajectory, engine = roll([says(call(text="x"))], [tool], multi_turn={"max_assistant_turns": 1})
    assert trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert tool.log["execute"] == 1
    assert len(engine.asked) == 1
    assert trajectory.response_ids == says(call(text="x"))  # what the tool said is not part of the context
    assert trajectory.rewards.total() == 1.5


def test_assistant_turns_are_checked_before_user_turns():
    limits = {"max_assistant_turns": 2, "max_user_turns": 1}
    trajectory, _ = roll([says(call(text="x"))] * 3, [Echo()], multi_turn=limits)
    assert trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS


def test_turn_limits_are_checked_before_the_fit_of_the_answer():
    tool = Echo(respond=lambda _: "long " * 500)
    limits = {"max_assistant_turns": 1}
    room = len(says(call())) + 20
    assert roll([says(call())], [tool], response_length=room, multi_turn=limits)[0].stop_reason is (
        StopReason.MAX_ASSISTANT_TURNS
    )
    trajectory, _ = roll([says(call())], [tool], response_length=room)
    assert trajectory.stop_reason is StopReason.TOOL_RESPONSE_OVERFLOW
    assert trajectory.response_ids == says(call())
    assert tool.log["execute"] == 2


def test_a_turn_cut_by_the_budget_ends_for_length_and_runs_no_tool():
    tool = Echo(final=0.25)
    turn = says(call(text="x") + call(text="y"))
    trajectory, _ = roll([turn], [tool], row={"tools_kwargs": {"echo": {}}}, response_length=len(turn) - 1)
    assert trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert trajectory.response_ids == turn[:-1]
    assert tool.log == {"create": 1, "calc_reward": 1, "release": 1}
    assert trajectory.rewards.final == {"echo": 0.25}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", '[{"name": "echo", "arguments": {"text": "x"}}]'),
        ("llama3_json", 'Look: {"name": "echo", "parameters": {"text": "x"}}'),
        ("qwen3_coder", "<function=echo>"),
    ],
)
def test_a_whole_call_in_a_turn_cut_by_the_budget_is_not_run(name, text):
    tool, parser, turn = Echo(), ToolParser.get_tool_parser(name, TOKENIZER), encode(text)
    assert [call.name for call in parser.parse(text).calls] == ["echo"]
    trajectory, _ = roll([[*turn, *encode(" and")]], [tool], response_length=len(turn), parser=parser)
    assert trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert tool.log == {}
    assert [(record.name, record.error) for record in trajectory.tool_calls] == [("echo", "not_executed")]


def test_a_turn_that_fills_the_budget_exactly_ends_for_length():
    turn = says(call(text="x"))
    trajectory, _ = roll([turn], [Echo()], response_length=len(turn))
    assert trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert [(record.name, record.error) for record in trajectory.tool_calls] == [("echo", "not_executed")]


def test_the_budget_shrinks_from_turn_to_turn_and_leaves_room_for_one_token():
    first, second = says(call(text="x")), says("a long answer of many tokens")
    _, engine = roll([first, second], [Echo()], response_length=500)
    context = len(engine.asked[1][1]) - len(engine.asked[0][1])
    assert [params.max_tokens for _, _, params in engine.asked] == [500, 500 - context]
    fits, _ = roll([first, second], [Echo()], response_length=context + 1)
    assert (fits.stop_reason, fits.assistant_turns) == (StopReason.RESPONSE_LENGTH, 2)
    assert fits.response_length == context + 1
    overflows, _ = roll([first, second], [Echo()], response_length=context)
    assert (overflows.stop_reason, overflows.assistant_turns) == (StopReason.TOOL_RESPONSE_OVERFLOW, 1)


def test_a_call_cut_short_is_counted_but_not_answered():
    turn = encode('<tool_call>\n{"name": "echo", "argum')
    trajectory, engine = roll([turn], [Echo()], response_length=len(turn) - 1)
    assert trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert [record.error for record in trajectory.tool_calls] == ["malformed"]
    assert len(engine.asked) == 1


@pytest.mark.parametrize("loop_class", [ToolAgentLoop, SingleTurnAgentLoop])
def test_a_prompt_that_does_not_fit_asks_nothing_of_anybody(loop_class):
    tool = Echo(final=1.0)
    prompt = len(roll([says("5")], [tool], loop_class=loop_class)[0].prompt_ids)
    for limits in ({"prompt_length": prompt - 1}, {"max_model_len": prompt}):
        trajectory, engine = roll([says("5")], [tool], loop_class=loop_class, **limits)
        assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG
        assert engine.asked == []
        assert trajectory.rewards.final == {}
    assert roll([says("5")], [tool], loop_class=loop_class, prompt_length=prompt, max_model_len=prompt + 1)[1].asked


def test_created_tools_of_a_too_long_prompt_are_released_without_a_reward():
    tool = Echo(final=1.0)
    trajectory, _ = roll([], [tool], row={"tools_kwargs": {"echo": {}}}, prompt_length=3)
    assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG
    assert tool.log == {"create": 1, "release": 1}


def test_single_turn_samples_once_and_calls_nothing():
    tool = Echo()
    trajectory, engine = roll([says(call(text="x"))], [tool], loop_class=SingleTurnAgentLoop)
    assert (trajectory.stop_reason, trajectory.assistant_turns) == (StopReason.COMPLETED, 1)
    assert engine.asked[0][1] == CHAT.initial_ids(QUESTION)
    assert not tool.log
    cut, _ = roll([says("a long answer")], loop_class=SingleTurnAgentLoop, response_length=2)
    assert cut.stop_reason is StopReason.RESPONSE_LENGTH


# -- calls -------------------------------------------------------------------------------------------------------


def test_calls_beyond_the_limit_are_answered_and_not_executed():
    tool = Echo()
    turn = says(call(text="a") + call(text="b") + call(text="c"))
    trajectory, engine = roll([turn, says("5")], [tool], multi_turn={"max_parallel_calls": 2})
    assert tool.log["execute"] == 2
    answers = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert answers[:2] == ["a", "b"]
    assert "at most 2 calls" in answers[2]
    assert [record.error for record in trajectory.tool_calls] == [None, None, "not_executed"]
    assert trajectory.tool_calls[2].arguments == '{"text": "c"}'
    assert "at most 2 calls" in TOKENIZER.decode(engine.asked[1][1])


def test_a_call_that_another_format_reads_is_no_malformed_one_only():
    """As where the format is qwen3_coder, whose tags are those of hermes."""
    turn = says("<tool_call>\n<function=echo>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>")
    trajectory, _ = roll([turn, says("5")], [Echo()])
    assert [record.error for record in trajectory.tool_calls] == ["malformed"]
    assert trajectory.metrics["unread_calls"] == 1
    broken, _ = roll([says("<tool_call>\n{echo\n</tool_call>"), says("5")], [Echo()])
    assert "unread_calls" not in broken.metrics


def test_malformed_and_unknown_calls_are_answered_and_counted():
    turn = says("<tool_call>\n{broken\n</tool_call>" + call("ehco", text="a") + call(text="b"))
    trajectory, engine = roll([turn, says("5")], [Echo()])
    assert [record.error for record in trajectory.tool_calls] == ["unknown_tool", None, "malformed"]
    asked = TOKENIZER.decode(engine.asked[1][1])
    assert "Unknown tool 'ehco'. Available tools: echo." in asked
    assert "tool call 1 was not read: invalid JSON" in asked
    assert trajectory.stop_reason is StopReason.COMPLETED


def test_what_is_wrong_with_a_malformed_call_is_kept_whole_where_the_model_saw_it_cut():
    turn = says("<tool_call>\n{broken\n</tool_call>")
    trajectory, engine = roll([turn, says("5")], [Echo()], response_length=len(turn) + 65)
    assert "(truncated)" in TOKENIZER.decode(engine.asked[1][1])
    [record] = trajectory.tool_calls
    assert record.response.startswith("tool call 1 was not read: invalid JSON, Expecting property name")
    assert "truncated" not in record.response
    quoted = {"error": "tool", "name": "echo", "response": f"cannot parse '{'x' * 200}': a bracket is missing"}
    evidence = find_evidence([{"tool_calls": [quoted], "stop_reason": "", "response_ids": [], "metrics": {}}])
    assert evidence["tool/echo"].what == ", 1 with: cannot parse 'xxxxxxxxxxxxxxx…': a bracket is missing"


@pytest.mark.parametrize(
    ("text", "unread"),
    [('[echo(text="a")]', 1), ("echo says [a]", 0), ('[other(text="a")]', 0), ("5", 0)],
)
def test_a_call_in_another_format_is_text_and_told_as_such(text, unread):
    trajectory, _ = roll([says(text)], [Echo()])
    assert (trajectory.stop_reason, trajectory.tool_calls) == (StopReason.COMPLETED, [])
    assert trajectory.metrics.get("unread_calls", 0) == unread
    figures = failure_metrics([Rollout([trajectory])])
    assert figures["rollout/unread_calls"] == unread
    assert ("rollout/unread_calls" in find_problems(figures)) == bool(unread)


def test_a_parser_of_the_users_own_that_reads_calls_into_any_text_is_not_asked():
    class Eager(ToolParser):
        def parse(self, text, tools=None):
            return ParsedResponse("", [FunctionCall(name="echo", arguments="{}")], [])

    ToolParser.register("eager_reader")(Eager)
    trajectory, _ = roll([says("echo says [a]")], [Echo()])
    assert trajectory.metrics.get("unread_calls", 0) == 0


def test_step_rewards_stand_where_their_turn_ended_and_the_rest_on_the_last_sampled_token():
    tool = Echo(reward=0.5, final=2.0)
    first, second = says(call(text="a") + call(text="b")), says("5")
    trajectory, _ = roll([first, second], [tool])
    assert trajectory.rewards.steps == [(0, "echo", 0.5), (0, "echo", 0.5)]
    assert trajectory.rewards.final == {"echo": 2.0}
    scores = trajectory.token_level_scores()
    assert {i: s for i, s in enumerate(scores) if s} == {len(first) - 1: 1.0, len(scores) - 1: 2.0}


def test_a_step_reward_of_zero_is_kept_and_one_of_a_refused_call_is_none():
    trajectory, _ = roll([says(call(text="a") + call("nobody")), says("5")], [Echo()])
    assert trajectory.rewards.steps == [(0, "echo", 0.0)]


@pytest.mark.parametrize(
    "media", [{"image": ["pixels"]}, {"video": ["film"]}, {"image": ["pixels"], "video": ["film"]}]
)
def test_media_beside_text_are_announced_too(media):
    tool = Echo(respond=lambda _: ToolResponse(text="Here it is.", **media))
    trajectory, _ = roll([says(call()), says("5")], [tool])
    told = "Here it is.\n(the tool returned media that a text model cannot see)"
    assert trajectory.tool_calls[0].response == told
    assert trajectory.messages[-2]["content"] == told


# -- the row's tools ---------------------------------------------------------------------------------------------


def test_a_greeting_is_appended_to_the_last_user_message_and_the_row_stays_as_it_was():
    tool = Echo(greeting="The board is empty.")
    prompt = [{"role": "user", "content": "Play."}, {"role": "assistant", "content": "Yes."}]
    row = {"raw_prompt": [*prompt, {"role": "user", "content": "Go on."}], "tools_kwargs": {"echo": {}}}
    trajectory, engine = roll([says("5")], [tool], row=row)
    shown = [*prompt, {"role": "user", "content": "Go on.\nThe board is empty."}]
    assert engine.asked[0][1] == CHAT.initial_ids(shown, [tool.get_openai_tool_schema().to_openai()])
    assert trajectory.prompt_ids == engine.asked[0][1]
    assert row["raw_prompt"][-1]["content"] == "Go on."


def test_a_greeting_without_a_user_message_or_text():
    row = {"raw_prompt": [{"role": "system", "content": "Play."}], "tools_kwargs": {"echo": {}}}
    trajectory, _ = roll([says("5")], [Echo(greeting="Hello.")], row=row)
    assert trajectory.messages[1] == {"role": "user", "content": "Hello."}

    class Painter(Echo):
        async def create(self, instance_id=None, **kwargs):
            return instance_id, ToolResponse(image=["pixels"])

    trajectory, _ = roll([says("5")], [Painter()], row={"tools_kwargs": {"echo": {}}})
    assert "None" not in trajectory.messages[1]["content"]
    assert "media" in trajectory.messages[1]["content"]


def test_a_row_sees_and_may_call_only_its_active_tools():
    one, other = Echo("one"), Echo("other")
    script = [says(call("other", text="x") + call("one", text="y")), says("5")]
    trajectory, engine = roll(script, [one, other], row={"active_tools": ["one"]})
    assert "other" not in TOKENIZER.decode(engine.asked[0][1])
    assert [record.error for record in trajectory.tool_calls] == ["unknown_tool", None]
    assert not other.log


def test_a_row_that_contradicts_itself_is_a_data_error_before_any_tool_is_made():
    one, other = Echo("one"), Echo("other")
    row = {"active_tools": ["one"], "tools_kwargs": {"one": {}, "other": {}}}
    with pytest.raises(DataError, match="row r: tools_kwargs names the tool 'other', which is not selected"):
        roll([], [one, other], row=row)
    with pytest.raises(DataError, match="row r: the selected tool 'onne' is not configured; did you mean 'one'"):
        roll([], [one, other], row={"active_tools": ["onne"]})
    with pytest.raises(DataError, match="'third', which is not configured"):
        roll([], [one, other], row={"tools_kwargs": {"third": {}}})
    assert not one.log
    assert roll([says("5")], [one, other], row={"active_tools": ["one"], "tools_kwargs": {"other": None}})[1].asked


# -- truncation --------------------------------------------------------------------------------------------------


def tool_tokens(text):
    runs = CHAT.context_ids([{"role": "tool", "content": text}])
    return sum(len(ids) for ids, provenance in runs if provenance is Provenance.TOOL)


CONTROL = ["<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "</tool_response>"]
hostile = st.lists(
    st.sampled_from([*CONTROL, "é", "日本", "🙂", "word ", "7", "\n"]) | st.text(max_size=5), max_size=60
).map(lambda parts: "".join(parts).encode("utf-8", "replace").decode())


@settings(max_examples=60, deadline=None)
@given(text=hostile, limit=st.integers(1, 40), side=st.sampled_from(["left", "middle", "right"]))
def test_a_shortened_text_takes_at_most_its_limit(text, limit, side):
    cut = TokenLimit(limit, side, TOKENIZER, tool_tokens).cut(text)
    assert tool_tokens(cut) <= limit
    if tool_tokens(text) <= limit:
        assert cut == text
    else:
        assert "�" not in cut or "�" in text  # no character is cut in two
        plain = cut.replace("...(truncated)...", "|").replace("...(truncated)", "|").replace("(truncated)...", "|")
        first, _, last = plain.partition("|") if "|" in plain else (plain, "", "")
        if "|" not in text:
            assert {"left": text.endswith(last or first), "right": text.startswith(first), "middle": True}[side]


def test_shortening_looks_at_a_bounded_part_of_a_huge_text():
    looked_at = []

    def tokenizer(text, **options):
        looked_at.append(len(text))
        return TOKENIZER(text, **options)

    cut = TokenLimit(20, "middle", tokenizer, tool_tokens).cut("word " * 1_000_000)
    assert tool_tokens(cut) <= 20
    assert sum(looked_at) <= 2 * 8 * 20  # at 8 characters a token, both ends
    assert tool_tokens(TokenLimit(20, "left", tokenizer, tool_tokens).cut("w" * 10**6)) <= 20
    assert max(looked_at) <= 64 * 20


# -- exactness ---------------------------------------------------------------------------------------------------

A_CALL = '{"name": "echo", "arguments": {"text": "x"}}'
model_text = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", A_CALL, "<think>", "</think>", " 5", "é", "Hi"]), max_size=6
).map("".join)
a_turn = st.tuples(
    st.sampled_from(["call", "call", "call", "two calls", "anything"]),
    model_text,
    st.sampled_from([[CHAT.end_of_turn_id], [CHAT.end_of_turn_id], []]),
)


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(a_turn, min_size=1, max_size=4),
    outputs=st.lists(hostile, min_size=9, max_size=9),
    budget=st.integers(20, 600),
)
def test_what_is_trained_on_is_what_was_sampled_after_what_the_engine_saw(turns, outputs, budget):
    """For any turns of the model and any outputs of the tools, special tokens in both."""
    answers = iter(outputs)
    tool = Echo(respond=lambda _: next(answers))
    bodies = {"call": call(text="x"), "two calls": call(text="x") + call(text="y"), "anything": ""}
    script = [encode(text + bodies[kind]) + end for kind, text, end in turns] + [says("done")]
    script = [ids or says("") for ids in script]
    trajectory, engine = roll(script, [tool], response_length=budget)
    response, mask = trajectory.response_ids, trajectory.response_mask
    assert len(response) == len(mask) == len(trajectory.response_log_probs) <= budget
    assert engine.asked[0][1] == trajectory.prompt_ids
    drawn = []
    sampled = [s for s in trajectory.segments if s.provenance is SAMPLED]
    assert len(sampled) == len(engine.asked) == trajectory.assistant_turns
    before = list(trajectory.prompt_ids)
    turn = 0
    for segment in trajectory.segments:
        if segment.provenance is SAMPLED:
            assert engine.asked[turn][1] == before  # the engine was asked with the prompt and all segments before
            assert list(segment.token_ids) == script[turn][: len(segment.token_ids)]
            drawn += segment.token_ids
            turn += 1
        elif segment.provenance is Provenance.TOOL:
            assert not {CHAT.end_of_turn_id, *TOKENIZER.all_special_ids} & set(segment.token_ids)
        before += segment.token_ids
    assert drawn == [token for token, m in zip(response, mask) if m]


# -- room to answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["tokens", "characters"])
@pytest.mark.parametrize(("side", "mark"), [("left", "(truncated)..."), ("right", "...(truncated)")])
def test_a_long_answer_is_cut_until_the_model_has_room_for_its_own(unit, side, mark):
    tool, reserve = Echo(respond=lambda _: "first " + "long " * 300 + "last"), 30
    limits = {"min_answer_tokens": reserve, "tool_response_truncate_side": side, "tool_response_length_unit": unit}
    first = says(call())
    trajectory, engine = roll([first, says("5")], [tool], response_length=len(first) + 100, multi_turn=limits)
    assert (trajectory.stop_reason, trajectory.assistant_turns) == (StopReason.COMPLETED, 2)
    assert reserve <= engine.asked[1][2].max_tokens <= reserve + 3  # the rest is the answer's
    shown = trajectory.messages[-2]["content"]
    assert mark in shown
    assert shown.startswith("first ") == (side == "right")
    assert shown.endswith(" last") == (side == "left")
    assert trajectory.tool_calls[0].response == shown
    assert shown in TOKENIZER.decode(engine.asked[1][1])


def test_of_several_answers_the_longest_are_cut():
    answers = iter(["short", "long " * 200, "longer " * 400])
    turn = says(call(text="a") + call(text="b") + call(text="c") + BROKEN)
    limits = {"min_answer_tokens": 20}
    tool = Echo(respond=lambda _: next(answers))
    trajectory, engine = roll([turn, says("5")], [tool], response_length=len(turn) + 300, multi_turn=limits)
    shown = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert shown[0] == "short"
    assert "was not read" in shown[3]
    assert shown[1].startswith("long long")
    assert shown[2].startswith("longer longer")
    lengths = [len(encode(text)) for text in shown[1:3]]
    assert abs(lengths[0] - lengths[1]) <= 4
    assert [record.response for record in trajectory.tool_calls] == shown
    assert [record.cut for record in trajectory.tool_calls] == [False, True, True, False]
    metrics = tool_metrics([trajectory])
    assert metrics[f"tool/{tool.name}/cut"] == 2
    [problem] = [each for key, each in find_problems(metrics).items() if key.endswith("/cut")]
    assert problem.what.startswith(f"2 of 3 answers of {tool.name} were cut")
    assert 20 <= engine.asked[1][2].max_tokens <= 26


def test_an_answer_of_which_next_to_nothing_would_be_left_ends_the_trajectory():
    tool, turns = Echo(respond=lambda _: "long " * 300), [says(call()), says("5")]
    context = len(roll(turns, [Echo()])[1].asked[1][1]) - len(
        roll(turns, [Echo()])[1].asked[0][1]
    )  # with an empty answer
    for room, reason in ((LEAST_TOKENS, StopReason.COMPLETED), (LEAST_TOKENS - 1, StopReason.TOOL_RESPONSE_OVERFLOW)):
        trajectory, _ = roll(turns, [tool], response_length=context + room + 5, multi_turn={"min_answer_tokens": 5})
        assert trajectory.stop_reason is reason
    assert len(trajectory.tool_calls[0].response) > 1000  # as the tool gave it
    assert trajectory.response_ids == turns[0]


def test_the_tags_of_results_are_not_cut():
    tool = Echo(respond=lambda _: "long " * 300)
    turn = says("<search>x</search>")
    parser = ToolParser.get_tool_parser("search_r1", TOKENIZER)
    trajectory, _ = roll([turn, says("5")], [tool], response_length=len(turn) + 120, parser=parser)
    shown = trajectory.messages[-2]["content"]
    assert shown.startswith("<information>long long")
    assert shown.endswith("long </information>")
    assert "...(truncated)..." in shown


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(1, 1500))
def test_shortened_answers_save_what_they_must_and_no_more_than_they_need(sizes, excess):
    limit = TokenLimit(None, "right", TOKENIZER, lambda text: len(encode(text)))
    texts = ["a b " * (size // 2) for size in sizes]
    before = [limit.count(text) for text in texts]
    cut = shorten_texts(texts, excess, limit)
    if cut is None:
        room = sum(before) - excess
        assert sum(min(size, LEAST_TOKENS) for size in before) > room or max(before) < LEAST_TOKENS
        return
    after = [limit.count(text) for text in cut]
    assert sum(before) - sum(after) >= excess
    longest = max(after)
    assert all(text == whole for text, whole, size in zip(cut, texts, before) if size < longest)
    assert sum(before) - sum(after) <= excess + 4 * len(sizes)


# -- malformed calls, and time ---------------------------------------------------------------------------------------

BROKEN = '<tool_call>\n{"name": "echo"\n</tool_call>'
