"""The documented keys of conversations (`rollout.multi_turn`, `rollout.agent`): each changes what a rollout does, or is
refused with the reason. There is no third kind, and no key of ours that is missing here."""

import asyncio
import copy
import json
import sys
from dataclasses import replace

import pytest
import yaml
from agents_stage import QUESTION, SAMPLING, TOKENIZER, Echo, Recorder, call, context, says

from etude.agents import AGENT_LOOPS, AgentLoopManager
from etude.agents.base import register_agent_loops
from etude.agents.interactions import load_interactions
from etude.chat import ToolParser
from etude.config import compose
from etude.errors import ConfigError
from etude.models import TinyModelSpec, build_tiny_model, save_pretrained
from etude.options import ModelOptions
from etude.options.validate import plain
from etude.trajectory import StopReason
from etude.workers.context import collect_tools
from etude.workers.tokenizer_bundle import load_tokenizer_bundle

ROLLOUT = "actor_rollout_ref.rollout"
LONG = " ".join(map(str, range(60)))
BROKEN = '<tool_call>\n{"name": "echo"\n</tool_call>'
TWO_CALLS = [says(call(text="a") + call(text="b")), says("5")]
THREE_TURNS = [says(call(text="a")), says(call(text="b")), says("5")]


def rollout_options(*overrides):
    """What the trainer makes of command-line settings below `rollout`."""
    return compose("ppo_trainer", [f"{ROLLOUT}.{each}" for each in overrides]).rollout


def played(*overrides, **given):
    """The only trajectory of a row, rolled out by a scripted model with a tool that repeats its text."""
    return sequences(*overrides, **given)[-1]


def sequences(*overrides, script=THREE_TURNS, row=None, respond=None, tools=None, interactions=()):
    """All of them, where the conversation was compacted."""
    options = rollout_options(*overrides)
    tools = [Echo(respond=respond)] if tools is None else tools
    shared = replace(context(tools, interactions=interactions), options=options)
    manager = AgentLoopManager(shared, Recorder(script))
    batch = [{"raw_prompt": QUESTION, "uid": "u", "rollout_index": 0, **(row or {})}]
    [result] = asyncio.run(asyncio.wait_for(manager.generate(batch, SAMPLING), 60))
    return result.sequences


def answers(*overrides, **given):
    """What the tools are shown to have said."""
    return [m["content"] for m in played(*overrides, **given).messages if m["role"] == "tool"]


def enable(folder):
    assert played("multi_turn.enable=true").tool_calls
    assert not played("multi_turn.enable=false").tool_calls


def tool_config_path(folder):
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [{"config": {"type": "sandbox_fusion"}}]}))
    for key in ("multi_turn.tool_config_path", "tool_config"):  # the second is its other name
        options = rollout_options(f"{key}={folder}/tools.yaml")
        assert set(collect_tools(options.multi_turn)) == {"code_interpreter"}
    assert collect_tools(rollout_options().multi_turn) == {}


def function_tool_path(folder):
    (folder / "mine.py").write_text(
        'from etude.tools import function_tool\n\n\n@function_tool\ndef twice(x: int) -> int:\n    """Doubles.\n\n'
        '    Args:\n        x: a number\n    """\n    return 2 * x\n'
    )
    tools = collect_tools(rollout_options(f"multi_turn.function_tool_path={folder}/mine.py").multi_turn)
    script = [says(call("twice", x=4)), says("8")]
    assert [r.response for r in played(script=script, tools=list(tools.values())).tool_calls] == ["8"]


def interaction_config_path(folder):
    entry = {"name": "gsm8k", "class_name": "etude.agents.interactions.gsm8k.Gsm8kInteraction", "config": {}}
    (folder / "users.yaml").write_text(yaml.safe_dump({"interaction": [entry]}))
    users = load_interactions(
        rollout_options(f"multi_turn.interaction_config_path={folder}/users.yaml").multi_turn.interaction_config_path
    )
    row = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "5"}}
    turns = [says("#### 4"), says("#### 5")]
    assert played(script=turns, row=row, interactions=users.values()).assistant_turns == 2


def max_assistant_turns(folder):
    for key in ("multi_turn.max_assistant_turns", "max_turns"):
        trajectory = played(f"{key}=2")
        assert (trajectory.assistant_turns, trajectory.stop_reason) == (2, StopReason.MAX_ASSISTANT_TURNS)
    assert played().assistant_turns == 3


def max_user_turns(folder):
    trajectory = played("multi_turn.max_user_turns=1")
    assert (trajectory.user_turns, trajectory.stop_reason) == (1, StopReason.MAX_USER_TURNS)


def max_parallel_calls(folder):
    assert answers(script=TWO_CALLS) == ["a", "b"]
    first, second = answers("multi_turn.max_parallel_calls=1", script=TWO_CALLS)
    assert first == "a"
    assert "at most 1 calls" in second


def max_tool_response_length(folder):
    [whole, _] = answers(respond=lambda _: LONG)
    [cut, _] = answers("multi_turn.max_tool_response_length=20", respond=lambda _: LONG)
    assert whole == LONG
    assert "(truncated)" in cut
    assert len(TOKENIZER.encode(cut, add_special_tokens=False)) <= 20


def tool_response_length_unit(folder):
    few = "multi_turn.max_tool_response_length=20"
    [tokens, _] = answers(few, respond=lambda _: LONG)
    [characters, _] = answers(few, "multi_turn.tool_response_length_unit=characters", respond=lambda _: LONG)
    assert (len(tokens) > 20, len(characters)) == (True, 20)
    assert "(truncated)" in characters
    [cut, _] = answers(
        few, "multi_turn.tool_response_length_unit=characters", "multi_turn.tool_response_truncate_side=right",
        respond=lambda _: "\u65e5" * 60,
    )  # fmt: skip
    assert cut == "\u65e5" * 6 + "...(truncated)"


def tool_response_truncate_side(folder):
    short = "multi_turn.max_tool_response_length=20"
    cut = {
        side: answers(short, f"multi_turn.tool_response_truncate_side={side}", respond=lambda _: LONG)[0]
        for side in ("left", "middle", "right")
    }
    assert cut["left"].startswith("(truncated)...")
    assert cut["left"].endswith("59")
    assert cut["right"].startswith("0 1 2")
    assert cut["right"].endswith("...(truncated)")
    assert cut["middle"].startswith("0 ")
    assert cut["middle"].endswith("59")


def format_(folder):
    text = "<function=echo><parameter=text>\nhi\n</parameter></function>"
    xml = f"<tool_call>\n{text}\n</tool_call>"
    found = {}
    for name in ("hermes", "qwen3_coder"):
        parser = ToolParser.get_tool_parser(rollout_options(f"multi_turn.format={name}").multi_turn.format, TOKENIZER)
        found[name] = [json.loads(each.arguments) for each in parser.parse(xml).calls]
    assert found == {"hermes": [], "qwen3_coder": [{"text": "hi"}]}


def min_answer_tokens(folder):
    assert played("response_length=300").stop_reason is StopReason.COMPLETED
    trajectory = played("response_length=300", "multi_turn.min_answer_tokens=290")
    assert trajectory.stop_reason is StopReason.TOOL_RESPONSE_OVERFLOW


def max_seconds(folder):
    trajectory = played("multi_turn.max_seconds=1e-9", tools=[Echo(reward=0.5)])
    assert (trajectory.stop_reason, trajectory.assistant_turns) == (StopReason.TIME_LIMIT, 1)
    assert trajectory.rewards.steps == [(0, "echo", 0.5)]


def malformed_calls(folder):
    turns = [says(BROKEN + BROKEN), says("5")]
    told = played(script=turns)
    assert (told.assistant_turns, told.rewards.steps) == (2, [])
    assert played("multi_turn.malformed_calls=penalise", script=turns).rewards.steps == [(0, "malformed", -0.2)]
    ended = played("multi_turn.malformed_calls=end", script=[says(BROKEN + call(text="a"))])
    assert ended.stop_reason is StopReason.MALFORMED_CALL
    assert [record.error for record in ended.tool_calls] == ["malformed"]


def max_consecutive_malformed_calls(folder):
    script = [says(BROKEN), says(call(text="a")), says(BROKEN), says(BROKEN), says("5")]
    assert played(script=script).assistant_turns == 5
    trajectory = played("multi_turn.max_consecutive_malformed_calls=2", script=script)
    assert (trajectory.stop_reason, trajectory.assistant_turns) == (StopReason.MAX_MALFORMED_CALLS, 4)
    two = [says(BROKEN + BROKEN), says("5")]
    assert played("multi_turn.max_consecutive_malformed_calls=2", script=two).assistant_turns == 1
    mixed = [says(BROKEN + call(text="a")), says(BROKEN), says("5")]
    assert played("multi_turn.max_consecutive_malformed_calls=2", script=mixed).assistant_turns == 3


def max_turn_tokens(folder):
    first = len(THREE_TURNS[0])
    trajectory = played(f"multi_turn.max_turn_tokens={first - 1}")
    assert (trajectory.stop_reason, trajectory.assistant_turns) == (StopReason.TURN_LENGTH, 1)
    assert sum(trajectory.response_mask) == first - 1
    assert played(f"multi_turn.max_turn_tokens={first}").stop_reason is StopReason.COMPLETED
    single = played("multi_turn.max_turn_tokens=2", "agent.default_agent_loop=single_turn_agent")
    assert (single.stop_reason, single.response_length) == (StopReason.TURN_LENGTH, 2)


def max_trajectory_tokens(folder):
    first, second, third = map(len, THREE_TURNS)
    cut = played(f"multi_turn.max_trajectory_tokens={first + second - 1}")
    assert (cut.stop_reason, sum(cut.response_mask)) == (StopReason.TRAJECTORY_LENGTH, first + second - 1)
    used = played(f"multi_turn.max_trajectory_tokens={first + second}")
    assert (used.stop_reason, used.assistant_turns, len(used.tool_calls)) == (StopReason.TRAJECTORY_LENGTH, 2, 2)
    assert used.response_mask[-1] == 1
    whole = played(f"multi_turn.max_trajectory_tokens={first + second + third}")
    assert whole.stop_reason is StopReason.COMPLETED


def compact(folder):
    script = [says(call(text="a " * 14)), says(call(text="e")), says("so far"), says("5")]

    def rolled(*settings, script=script):
        limits = ("multi_turn.max_assistant_turns=3", "prompt_length=100", "response_length=600")
        return sequences(*limits, *(f"multi_turn.compact.{each}" for each in settings), script=script)

    settings = ("at_tokens=205", "prompt='Sum up.'", "summary_tokens=30")
    first, second = rolled(*settings)
    assert first.messages[-2:] == [{"role": "user", "content": "Sum up."}, {"role": "assistant", "content": "so far"}]
    assert second.messages[1]["content"].endswith("so far")
    assert [message["role"] for message in second.messages[2:]] == ["assistant"]
    _, kept = rolled(*settings, "keep_last=1")
    assert [message["role"] for message in kept.messages[2:]] == ["assistant", "tool", "assistant"]
    short, _ = rolled(*settings[:2], "summary_tokens=1")
    assert len(short.segments[-1].token_ids) == 1
    assert len(rolled(script=[*script[:2], says("5")])) == 1


def malformed_call_penalty(folder):
    settings = ("multi_turn.malformed_calls=penalise", "multi_turn.malformed_call_penalty=0.5")
    assert played(*settings, script=[says(BROKEN), says("5")]).rewards.steps == [(0, "malformed", -0.5)]


def default_agent_loop(folder):
    assert played().tool_calls
    assert not played("agent.default_agent_loop=single_turn_agent").tool_calls


def agent_loop_config_path(folder):
    (folder / "loops.yaml").write_text(
        yaml.safe_dump([{"name": "keys_stage", "_target_": "etude.agents.single_turn.SingleTurnAgentLoop"}])
    )
    options = rollout_options(f"agent.agent_loop_config_path={folder}/loops.yaml")
    try:
        register_agent_loops(options.agent.agent_loop_config_path)
        assert not played(row={"agent_name": "keys_stage"}).tool_calls
    finally:
        AGENT_LOOPS._items.pop("keys_stage", None)


def openai_agent(folder):
    (folder / "agent.py").write_text(
        "async def run(client, row):\n"
        "    await client.chat.completions.create(model='any', messages=row['raw_prompt'])\n"
        "    return 0.25\n"
    )
    program = (
        "import json, os, sys, urllib.request as web; body = json.dumps({'messages': json.load(sys.stdin)['raw_prompt']})"
        "; url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'"
        "; head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}"
        "; web.urlopen(web.Request(url, body.encode(), head)); open(os.environ['ETUDE_REWARD_FILE'], 'w').write('0.5')"
    )
    command = json.dumps([sys.executable, "-c", program])
    named = ("agent.default_agent_loop=openai_agent", f"agent.openai_agent.function={folder}/agent.py:run")
    assert played(*named).rewards.score == 0.25
    assert played(named[0], f"agent.openai_agent.command={command}").rewards.score == 0.5
    judge = json.dumps(
        [sys.executable, "-I", "-c", "import os; open(os.environ['ETUDE_REWARD_FILE'], 'w').write('0.75')"]
    )
    asks = json.dumps([sys.executable, "-c", program.partition("; open(")[0]])
    agent = (f"agent.openai_agent.command={asks}", f"agent.openai_agent.verifier={judge}")
    assert played(named[0], *agent, f"agent.openai_agent.workspace={folder}").rewards.score == 0.75
    assert not sequences(named[0], *agent, "agent.openai_agent.verifier_seconds=1e-3")
    assert played().rewards.score is None
    for wrong in (named[:1], (*named, "agent.openai_agent.command=[a]")):
        with pytest.raises(ConfigError, match="openai_agent"):
            rollout_options(*wrong)


def roles(folder):
    (folder / "agent.py").write_text(
        "async def run(client, row):\n"
        "    given = {'messages': row['raw_prompt'], 'extra_headers': {'X-Agent-Role': 'white'}}\n"
        "    await client.chat.completions.create(model='any', **given)\n"
        "    return {'white': 0.25}\n"
    )
    named = ("agent.default_agent_loop=openai_agent", f"agent.openai_agent.function={folder}/agent.py:run")
    played_as = played(*named, "agent.roles=[white,black]")
    assert (played_as.role, played_as.rewards.score) == ("white", 0.25)
    for wrong in ("[white,white]", "[white/1]", "['']"):
        with pytest.raises(ConfigError, match="roles"):
            rollout_options(f"agent.roles={wrong}")


def tools_in_system(folder):
    tokenizer, schemas = copy.deepcopy(TOKENIZER), [Echo().get_openai_tool_schema().to_openai()]
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    save_pretrained(build_tiny_model(TinyModelSpec(hidden_size=16, num_layers=1), tokenizer), tokenizer, folder)
    shown = {}
    for value in ("true", "false"):
        options = rollout_options(f"multi_turn.tools_in_system={value}", "multi_turn.format=hermes").multi_turn
        chat = load_tokenizer_bundle(ModelOptions(path=str(folder)), {}, options).chat
        shown[value] = "echo" in tokenizer.decode(chat.initial_ids(QUESTION, schemas))
    assert shown == {"true": True, "false": False}


WORKS = {
    f"multi_turn.{test.__name__.rstrip('_')}": test
    for test in (
        enable,
        tool_config_path,
        function_tool_path,
        interaction_config_path,
        max_assistant_turns,
        max_user_turns,
        max_parallel_calls,
        max_tool_response_length,
        tool_response_length_unit,
        tool_response_truncate_side,
        format_,
        tools_in_system,
        min_answer_tokens,
        max_seconds,
        malformed_calls,
        malformed_call_penalty,
        max_consecutive_malformed_calls,
        max_turn_tokens,
        max_trajectory_tokens,
        compact,
    )
} | {f"agent.{test.__name__}": test for test in (default_agent_loop, agent_loop_config_path, openai_agent, roles)}
REFUSED = {
    "multi_turn.num_repeat_rollouts=2": "rollout.n=N",
    "agent.agent_loop_manager_class=a.B": "agent_loop_config_path",
    "agent.custom_async_server.path=a.py": "rollout.name=",
    "over_sample_rate=0.1": "algorithm.filter_groups",
}


@pytest.mark.parametrize("key", WORKS)
def test_a_key_that_exists_changes_what_happens(key, tmp_path):
    WORKS[key](tmp_path)


@pytest.mark.parametrize("setting", REFUSED)
def test_a_key_that_would_do_nothing_is_refused_with_the_reason(setting, tmp_path):
    name = setting.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        rollout_options(setting)
    assert str(caught.value).startswith(f"{ROLLOUT}.{name} does not exist here (command line); ")
    assert REFUSED[setting] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_key_is_left_out():
    rollout = compose("ppo_trainer").rollout
    ours = {f"{section}.{name}" for section in ("multi_turn", "agent") for name in plain(getattr(rollout, section))}
    assert ours == set(WORKS)
