"""Parts of messages that a chat template leaves out: found in demonstrations, in prompts and by `etude chat check`."""

import json

import pytest
from test_chat_template import CHATML, REASONING, family, tokenizer_with

from etude.chat import ChatTemplate
from etude.chat.check import check_template
from etude.cli.main import cli, run
from etude.data import DataOptions, RLDataset
from etude.errors import DataError
from etude.models import TinyModelSpec, build_tiny_model, save_pretrained

USER = {"role": "user", "content": "What is 1 + 2?"}
ANSWER = {"role": "assistant", "content": "3"}
RESULT = {"role": "tool", "content": "3"}
THINKING = CHATML.replace("+ m.content +", "+ (m.thinking or '') + m.content +")
WORDS_ONLY_WITHOUT_CALLS = CHATML.replace(
    "+ m.content +", "+ ((m.tool_calls[0].function | tojson) if m.tool_calls else m.content) +"
)
NAMES_ONLY = CHATML.replace("+ m.content +", "+ m.content + (m.tool_calls[0].function.name if m.tool_calls else '') +")
NO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


def calling(content="", count=1, **arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments or {"a": 1}}}
    return {"role": "assistant", "content": content, "tool_calls": [call] * count}


def chat(template):
    return ChatTemplate(family(template) if template in ("tiny", "qwen") else tokenizer_with(template))


@pytest.mark.parametrize(
    ("template", "turn", "lost"),
    [
        (CHATML, calling(), "tool_calls[0]"),
        (WORDS_ONLY_WITHOUT_CALLS, calling("I add."), "content"),
        (WORDS_ONLY_WITHOUT_CALLS, calling("", 2), "tool_calls[1]"),
        (NAMES_ONLY, calling("I add.", b=2), "tool_calls[0].b"),
        (CHATML, ANSWER | {"reasoning_content": "One and two."}, "reasoning_content"),
        ("qwen", ANSWER | {"reasoning_content": "One and two."}, "reasoning_content"),
        (CHATML, ANSWER | {"function_call": {"name": "add", "arguments": "{}"}}, "function_call"),
    ],
)
def test_a_turn_that_loses_a_part_is_no_demonstration(template, turn, lost):
    made = chat(template)
    with pytest.raises(DataError) as caught:
        made.demonstration([USER, turn, RESULT, ANSWER])
    assert str(caught.value).startswith(f"messages[1]: the chat template does not write {lost}, so that")
    with pytest.raises(DataError, match=r"messages\[1\]: .* does not write"):
        made.require_whole([USER, turn, RESULT, ANSWER, USER])


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("tiny", calling("I add.", 2, a=1, b="x", c=[1], d=None, e=True, f=1.5)),
        ("qwen", calling("I add.", 2, a=1, b="x", c={"d": 1})),
        (THINKING, ANSWER | {"thinking": "One and two."}),
        (THINKING, ANSWER | {"thinking": "One and two.", "reasoning_content": "One and two."}),
        (CHATML, {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": " \n", "name": "a"}),
        (CHATML, calling() | {"tool_calls": None, "content": json.dumps({"name": "add"})}),
    ],
)
def test_a_turn_that_is_written_whole_is_one(template, turn):
    assert chat(template).demonstration([USER, turn, USER, ANSWER])


def test_the_system_message_of_a_prompt_counts_too():
    with pytest.raises(DataError, match=r"messages\[0\]: the chat template does not write content"):
        chat(NO_SYSTEM).require_whole([{"role": "system", "content": "Add."}, USER])
    chat(NO_SYSTEM).require_whole([USER])


def test_reasoning_that_is_dropped_for_its_place_alone_is_the_templates_policy():
    chat(REASONING).require_whole([USER, ANSWER | {"content": "<think>One and two.</think>3"}, USER])
    forgetful = THINKING.replace("(m.thinking or '')", "((m.thinking or '') if loop.last else '')")
    chat(forgetful).require_whole([USER, ANSWER | {"thinking": "One and two."}, USER])


def test_a_row_that_would_lose_a_call_is_named(tmp_path):
    prompt = [USER, calling(), RESULT, USER]
    row = {"data_source": "s", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "3"}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in [row | {"prompt": [USER]}, row]))
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: messages\[1\]: the chat template does not write tool_calls\[0\]"
    ):
        RLDataset(str(path), chat(CHATML), None, DataOptions(max_prompt_length=512))
    assert len(RLDataset(str(path), chat("tiny"), None, DataOptions(max_prompt_length=512))) == 2


def test_the_check_says_what_is_left_out(tmp_path, capsys):
    whole, words = check_template(family("tiny")), check_template(tokenizer_with(CHATML))
    assert "a call" not in whole.dropped
    assert words.dropped == ("a call", "words beside a call", "reasoning_content")
    tokenizer = family("tiny")
    tokenizer.chat_template = family("tiny").chat_template.replace("message.tool_calls", "message.nothing")
    save_pretrained(build_tiny_model(TinyModelSpec(), tokenizer), tokenizer, tmp_path)
    assert run(cli, ["chat", "check", str(tmp_path), "--no-tokens"]) == 0
    assert "rows that have a call" in capsys.readouterr().out.replace("\n", " ")
