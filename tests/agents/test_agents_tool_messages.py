"""Whatever a model calls and tools say, the chat template's limits never end a run: rollouts over many templates."""

import asyncio
from dataclasses import replace

import pytest
from agents_stage import QUESTION, SAMPLING, TEXTS, Echo, Recorder, call, context
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from turn_templates import HARMONY, HARMONY_TOKENS, ROLES, ROLES_TOKENS

from etude.agents import AgentLoopManager
from etude.agents.tool_messages import UNWRITABLE
from etude.chat import ChatTemplate, ToolParser
from etude.models import build_tiny_tokenizer
from etude.options import CompactOptions
from etude.trajectory import StopReason

CHATML = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
ALTERNATING = """{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
CUTTING = CHATML.replace("CONTENT", "m.content.split('</think>')[-1].split('##')[-1]")
REFUSING = CHATML.replace("CONTENT", "(raise_exception('no') if 'x' in m.content else m.content)")
"""Refuses every text with an x in it."""


def rolled(template, script, tools, *, special=(), fmt="hermes", eos="<|im_end|>", count=2, **given):
    """(results, engine) of the rows of a manager with that template; a turn of `script` is its text, its stop included."""
    tokenizer = build_tiny_tokenizer(TEXTS, 400)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(t, special=True, normalized=False) for t in special]}
        if special
        else {}
    )
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    engine = Recorder([tokenizer.encode(text, add_special_tokens=False) for text in script])
    shared = replace(
        context(tools, **given),
        tokenizer=tokenizer,
        chat=ChatTemplate(tokenizer),
        parser=ToolParser.get_tool_parser(fmt, tokenizer),
    )
    rows = [{"raw_prompt": QUESTION[1:], "uid": f"u{n}", "rollout_index": n} for n in range(count)]
    results = asyncio.run(asyncio.wait_for(AgentLoopManager(shared, engine).generate(rows, SAMPLING), 60))
    return results, engine, tokenizer


def last_context(engine, tokenizer):
    return tokenizer.decode(engine.asked[-1][1])


def test_calls_of_one_turn_are_named_in_gpt_oss_answers():
    script = [' to=functions.echo<|channel|>commentary json<|message|>{"text": "a"}<|call|>', "5<|return|>"]
    results, engine, tokenizer = rolled(
        HARMONY, script, [Echo()], special=HARMONY_TOKENS, fmt="gpt_oss", eos="<|return|>", count=1
    )
    assert results[0].trajectory.stop_reason is StopReason.COMPLETED
    assert last_context(engine, tokenizer).endswith(
        '{"text": "a"}<|call|>'
        '<|start|>functions.echo to=assistant<|channel|>commentary<|message|>"a"<|end|><|start|>assistant'
    )
    assert set(engine.asked[0][2].stop_token_ids) == set(tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"]))


def test_two_calls_of_a_glm_turn_share_one_head():
    one = "<tool_call>echo\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"
    script = [f"\n<think></think>\n{one}\n{one}<|observation|>", "\n<think></think>\n5<|user|>"]
    results, engine, tokenizer = rolled(
        ROLES, script, [Echo()], special=ROLES_TOKENS, fmt="glm4_moe", eos="<|endoftext|>", count=1
    )
    assert results[0].trajectory.stop_reason is StopReason.COMPLETED
    assert [record.error for record in results[0].trajectory.tool_calls] == [None, None]
    answer = "\n<tool_response>\na\n</tool_response>"
    assert last_context(engine, tokenizer).endswith(f"</tool_call><|observation|>{answer}{answer}<|assistant|>")


@pytest.mark.parametrize("turn", [call(text="a"), call(text="a") * 3, "<tool_call>{bad</tool_call>", call("nobody")])
def test_a_template_without_a_role_for_tools_does_not_end_a_run(turn):
    """Start-up refuses it where it can see it coming; a loop of the user's own, or a row, may get here all the same."""
    results, engine, tokenizer = rolled(ALTERNATING, [f"{turn}<|im_end|>", "5<|im_end|>"], [Echo()])
    assert [result.trajectory.stop_reason for result in results] == [StopReason.COMPLETED] * 2
    assert "<|im_start|>user\n<tool_response>" in last_context(engine, tokenizer)
    assert last_context(engine, tokenizer).count("<|im_start|>user") == 2


@pytest.mark.parametrize(
    "turn", ["<search>a</search><search>b</search>", "<tool_call>a</tool_call>", "<search></search>"]
)
def test_search_r1_needs_no_role_for_tools(turn):
    script = [f"{turn}<|im_end|>", "<answer>5</answer><|im_end|>"]
    results, engine, tokenizer = rolled(ALTERNATING, script, [Echo("search")], fmt="search_r1")
    assert [result.trajectory.stop_reason for result in results] == [StopReason.COMPLETED] * 2
    assert "<|im_start|>user\n<information>" in last_context(engine, tokenizer)


def test_an_answer_that_the_template_takes_apart_is_told(caplog):
    tool = Echo(respond=lambda arguments: arguments["text"])
    script = [call(text="a ## b") + call(text="fine") + "<|im_end|>", "5<|im_end|>"]
    results, engine, tokenizer = rolled(CUTTING, script, [tool])
    trajectory = results[0].trajectory
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == [UNWRITABLE, "fine"]
    assert UNWRITABLE in last_context(engine, tokenizer)
    assert trajectory.metrics["unwritable_answers"] == 1
    assert [record.response for record in trajectory.tool_calls] == ["a ## b", "fine"]


def test_an_answer_of_that_kind_that_is_to_be_compacted_is_a_placeholder_too():
    """Its rollout was dropped."""
    limits = {"compact": CompactOptions(at_tokens=80, summary_tokens=30, prompt="Sum up.")}
    tool = Echo(respond=lambda arguments: arguments["text"])
    script = [call(text="a ## b") + "<|im_end|>", "so far<|im_end|>", "5<|im_end|>"]
    results, _, tokenizer = rolled(CUTTING, script, [tool], multi_turn=limits, response_length=600)
    assert [len(result.sequences) for result in results] == [2, 2]
    shown = tokenizer.decode(results[0].earlier[0].context_ids())
    assert f"{UNWRITABLE}<|im_end|>\n<|im_start|>user\nSum up." in shown


def test_an_answer_with_a_tag_at_which_the_template_cuts_is_shown_whole():
    tool = Echo(respond=lambda arguments: arguments["text"])
    results, engine, tokenizer = rolled(CUTTING, [call(text="a </think> b") + "<|im_end|>", "5<|im_end|>"], [tool])
    assert "a </think> b<|im_end|>" in last_context(engine, tokenizer)
    assert "unwritable_answers" not in results[0].trajectory.metrics


def test_a_long_answer_of_that_kind_is_counted_as_it_is():
    tool = Echo(respond=lambda arguments: "word ## " * 300)
    results, _, _ = rolled(CUTTING, [call(text="a") + "<|im_end|>", "5<|im_end|>"], [tool])
    assert results[0].trajectory.stop_reason is StopReason.COMPLETED


def test_a_row_that_cannot_be_told_anything_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr("etude.agents.tool_messages.UNWRITABLE", "an x, too")
    tool = Echo(respond=lambda arguments: arguments["text"])
    results, _, _ = rolled(REFUSING, [call(text="x") + "<|im_end|>", "5<|im_end|>"], [tool])
    assert [(result.trajectory, result.dropped) for result in results] == [(None, StopReason.CONTEXT_REFUSED)] * 2
    assert tool.log["create"] == tool.log["release"] == 2


FRAGMENTS = [
    "<tool_call>", "</tool_call>", '{"name": "echo", "arguments": {"text": "x"}}', "</think>", "##", "<think>", "{", "echo",
    "<arg_key>text</arg_key>", "<arg_value>", "</arg_value>", "to=functions.echo", "<|channel|>commentary ", "<|message|>",
    "<|start|>assistant", "<|call|>", "<|end|>", "<|observation|>", "<|user|>", "<|im_start|>", "<search>", "</search>", " ",
]  # fmt: skip
STAGES = {
    "harmony": (HARMONY, HARMONY_TOKENS, "gpt_oss", "<|return|>"),
    "roles": (ROLES, ROLES_TOKENS, "glm4_moe", "<|endoftext|>"),
    "alternating": (ALTERNATING, (), "hermes", "<|im_end|>"),
    "searching": (ALTERNATING, (), "search_r1", "<|im_end|>"),
    "cutting": (CUTTING, (), "hermes", "<|im_end|>"),
}


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=25)
@given(turns=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), min_size=3, max_size=3))
def test_nothing_that_a_model_writes_ends_a_run(stage, turns):
    template, special, fmt, stop = STAGES[stage]
    tool = Echo(respond=lambda arguments: str(arguments.get("text", "")))
    results, _, _ = rolled(
        template,
        [f"{turn}{stop}" for turn in turns],
        [tool],
        special=special,
        fmt=fmt,
        eos=stop,
        count=1,
        multi_turn={"max_assistant_turns": 3},
    )
    assert results[0].trajectory is not None


@pytest.mark.parametrize("text", ["\ud83d", "a\x00b", "\ufdd0x\ufdd1\ufdd2", "", "  \n ", "\u202e\u200b", "<|im_end|>"])
def test_no_text_of_a_tool_ends_a_run(text):
    tool = Echo(respond=lambda arguments: text)
    for template in (CUTTING, ALTERNATING):
        results, _, _ = rolled(template, [call(text="a") + "<|im_end|>", "5<|im_end|>"], [tool])
        assert [result.trajectory.stop_reason for result in results] == [StopReason.COMPLETED] * 2
