"""Agent loops written for verl: they work as they are, or are refused in a line that says what to change."""

import asyncio
import copy
import json

import numpy as np
import pytest
import torch
from agents_stage import CHAT, QUESTION, SAMPLING, TOKENIZER, Drawn, Echo, call, loop_that_returns, roll, run, says
from transformers import BatchEncoding

from etude.agents import (
    AgentData,
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentState,
    EnvAgentLoop,
    ToolAgentLoop,
)
from etude.agents.client import token_ids
from etude.chat import ToolParser
from etude.dumps import rollout_record, trajectory_from_record
from etude.errors import ConfigError, EtudeError, InfrastructureError
from etude.inference import NativeEngine
from etude.models import TinyModelSpec, build_tiny_model
from etude.rewards.scoring import one_row
from etude.tools import ToolResponse
from etude.trajectory import StopReason

MODEL = build_tiny_model(TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=400), TOKENIZER)
CALL, ANSWER = call(text="seen"), "The answer is 5."


class SingleTurn(AgentLoopBase):
    """As of verl 0.6: the tokenizer writes the prompt, and what it returns goes on."""

    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        images = copy.deepcopy((kwargs.get("multi_modal_data") or {}).get("image", None))
        ids = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        )
        output = await self.server_manager.generate(
            request_id="mine", prompt_ids=ids, sampling_params=sampling_params, image_data=images
        )
        length = self.config["length"] if self.config else 100
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=output.token_ids[:length],
            response_mask=[1] * len(output.token_ids[:length]),
            response_logprobs=output.log_probs[:length] if output.log_probs else None,
            multi_modal_data={"image": images} if images is not None else {},
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=0.5),
        )


class ToolLoop(AgentLoopBase):
    """As of verl 0.7: a state machine of one's own, which writes the context with `apply_chat_template`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.rollout_config.response_length
        self.parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)

    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        media = await self.process_vision_info(messages)
        images, videos = media.get("images"), media.get("videos")
        schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in self.tools.values()]
        ids = await self.apply_chat_template(messages, tools=schemas, images=images, videos=videos)
        mask, log_probs, metrics, calls = [], [], {}, [None]
        while calls:
            output = await self.server_manager.generate(
                request_id="mine", prompt_ids=ids, sampling_params=sampling_params, image_data=images, video_data=videos
            )
            metrics["num_preempted"] = -1 if output.num_preempted is None else output.num_preempted
            assert output.routed_experts is None
            output.extra_fields.update({"turn_scores": [0.5], "tool_rewards": []})
            ids = ids + output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            _, calls = await self.parser.extract_tool_calls(output.token_ids, list(self.tools.values()))
            if calls:
                said = await self.apply_chat_template(
                    [{"role": "tool", "content": "seen"}], images=None, remove_system_prompt=True
                )
                ids, mask, log_probs = ids + said, mask + [0] * len(said), log_probs + [0.0] * len(said)
        return AgentLoopOutput(
            prompt_ids=ids[: len(ids) - len(mask)],
            response_ids=ids[-len(mask) :][: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=log_probs[: self.response_length],
            multi_modal_data={},
            mm_processor_kwargs={},
            num_turns=4,
            metrics=metrics,
            extra_fields=output.extra_fields,
        )


class Section(dict):
    """A configuration's section, as OmegaConf's can be read."""

    __getattr__ = dict.__getitem__


ROLLOUT = Section(response_length=200, multi_turn=Section(format="hermes"))
CONFIG = Section(actor_rollout_ref=Section(rollout=ROLLOUT), data=Section())


# -- ids ---------------------------------------------------------------------------------------------------------


def test_a_prompt_as_the_tokenizer_returns_it_is_rolled_out(loop_named):
    """Transformers 5 returns a BatchEncoding, which an engine cannot feed: every trajectory was lost to it."""
    loop_named("own", SingleTurn)
    results, _ = run("own", rows=3, engine=NativeEngine(MODEL), response_length=8, infrastructure_retries=0)
    for result in results:
        assert result.dropped is None
        assert result.trajectory.prompt_ids == CHAT.initial_ids(QUESTION)
        assert len(result.trajectory.response_ids) == 8
        assert result.trajectory.timings["generate_sequences"] == 0.5


@pytest.mark.parametrize(
    "given",
    [
        [3, 4],
        (3, 4),
        [[3, 4]],
        np.array([3, 4]),
        list(np.array([3, 4])),
        torch.tensor([[3, 4]]),
        {"input_ids": [3, 4], "attention_mask": [1, 1]},
        BatchEncoding({"input_ids": torch.tensor([[3, 4]])}),
    ],
)
def test_ids_in_every_form_that_a_tokenizer_returns(given):
    made = token_ids(given, "x")
    assert made == [3, 4]
    assert type(made) is list
    assert {type(each) for each in made} == {int}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([3, "input_ids", "attention_mask"], "'input_ids' (str)"),
        ([3.0], "3.0 (float)"),
        ([3, -1], "-1 (int)"),
        ([1 << 40], "1099511627776 (int)"),
        ([None], "None (NoneType)"),
        ([[1], [2]], "[1] (list)"),
        ("a text", "str"),
        (7, "int"),
        (None, "NoneType"),
        ({"ids": [3]}, "NoneType"),
    ],
)
def test_what_are_no_ids_is_said_in_a_line(given, found):
    with pytest.raises(EtudeError) as caught:
        token_ids(given, "prompt_ids")
    assert str(caught.value).startswith(f"prompt_ids must be a list of token ids, and holds {found}: ")
    assert "return_dict=False" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (lambda ids: [*ids, "input_ids"], r"prompt_ids must be a list of token ids, and holds 'input_ids'"),
        (lambda ids: [*ids, 400], "token id 400 is beyond the model's vocabulary of 3"),
    ],
)
def test_a_bug_of_the_loop_is_raised_and_costs_no_trajectory(loop_named, prompt, message):
    """Not retried, not counted as broken infrastructure; and a foreign id fails its own request alone."""

    class Own(AgentLoopBase):
        async def run(self, sampling_params, **row):
            ids = prompt(self.chat.initial_ids(row["raw_prompt"]))
            await self.server_manager.generate(prompt_ids=ids, sampling_params=sampling_params)

    loop_named("own", Own)
    with pytest.raises(EtudeError, match=message):
        run("own", rows=2, engine=NativeEngine(MODEL), response_length=8)


def test_a_foreign_id_leaves_other_requests_alone():
    engine = NativeEngine(MODEL)

    async def main():
        good = engine.generate("good", [3, 4], SAMPLING.params(0, 20, ()))
        bad = engine.generate("bad", [3, 4000], SAMPLING.params(1, 20, ()))
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = asyncio.run(main())
    assert len(good.token_ids) == 20
    assert isinstance(bad, EtudeError)


# -- what loops of verl ask of their base class --------------------------------------------------------------------


def test_a_loop_with_tools_of_verl_0_7(loop_named):
    loop_named("own", ToolLoop)
    tools = [Echo()]
    ([result], engine) = run("own", script=[says(CALL), says(ANSWER)], tools=tools, config=CONFIG)
    trajectory = result.trajectory
    assert trajectory.prompt_ids == CHAT.initial_ids(QUESTION, [tools[0].tool_schema.to_openai()])
    said = [token for ids, _ in CHAT.context_ids([{"role": "tool", "content": "seen"}]) for token in ids]
    assert trajectory.response_ids == [*says(CALL), *said, *says(ANSWER)]
    assert trajectory.response_mask == [1] * len(says(CALL)) + [0] * len(said) + [1] * len(says(ANSWER))
    assert trajectory.timings == {}
    assert len(engine.asked) == 2


def test_extra_fields_reach_the_scorer_and_the_dump(loop_named):
    loop_named("own", ToolLoop)
    ([result], _) = run("own", config=CONFIG)
    row = {"extra_info": {"index": 3}}
    assert result.trajectory.extra_fields == {"turn_scores": [0.5], "tool_rewards": []}
    seen = one_row(result.trajectory, row).non_tensor_batch["extra_info"][0]
    assert (seen["index"], seen["turn_scores"], seen["num_turns"]) == (3, [0.5], 4)
    record = rollout_record(result.trajectory, row, step=1, input="", output="", score=None)
    again = trajectory_from_record(json.loads(json.dumps(record)))
    assert again.extra_fields == result.trajectory.extra_fields


def test_what_is_said_beside_a_loops_own_reward_is_reported(loop_named):
    def rewarded(trajectory):
        output = trajectory.to_output()
        output.reward_score, output.extra_fields = 0.5, {"reward_extra_info": {"acc": 1.0}}
        return output

    loop_named("own", loop_that_returns(rewarded))
    ([result], _) = run("own", engine=Drawn([says("one"), says("two")]))
    assert (result.trajectory.rewards.score, result.trajectory.rewards.score_info) == (0.5, {"acc": 1.0})


@pytest.mark.parametrize("name", ["multi_modal_data", "mm_processor_kwargs", "mm_processor_output", "routed_experts"])
def test_media_that_nobody_would_train_on_are_refused(loop_named, name):
    def with_media(trajectory):
        output = trajectory.to_output()
        setattr(output, name, {"images": ["pixels"]})
        return output

    loop_named("own", loop_that_returns(with_media))
    with pytest.raises(EtudeError, match=f"'own' returned a wrong AgentLoopOutput: {name} is not used here"):
        run("own", engine=Drawn([says("one"), says("two")]))


def test_init_class_is_called_and_what_it_sets_is_kept(loop_named):
    class Own(ToolAgentLoop):
        calls = 0

        @classmethod
        def init_class(cls, config, tokenizer, processor, **kwargs):
            if cls._class_initialized:
                return
            cls._class_initialized = True
            cls.calls += 1
            cls.seen = (config, tokenizer, processor, kwargs)
            cls.max_assistant_turns = 1
            cls.tools = {"echo": Echo(respond=lambda _: "mine")}

    trajectories = [roll([says(CALL), says(ANSWER)], [Echo()], loop_class=Own)[0] for _ in range(2)]
    assert Own.calls == 1
    assert Own.seen == (None, TOKENIZER, None, {})
    for trajectory in trajectories:
        assert trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS
        assert trajectory.tool_calls[0].response == "mine"
    assert not AgentLoopBase._class_initialized


@pytest.mark.parametrize("keywords", [{"max_parallel_calls": 1}, {"max_assistant_turns": 1}])
def test_limits_that_a_subclass_sets_hold(keywords):
    class Own(ToolAgentLoop):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            vars(self).update(keywords)

    trajectory, _ = roll([says(CALL + CALL), says(ANSWER)], [Echo()], loop_class=Own)
    ran = [record.error for record in trajectory.tool_calls]
    expected = {"max_parallel_calls": ([None, "not_executed"], 2), "max_assistant_turns": ([None, None], 1)}
    assert (ran, trajectory.assistant_turns) == expected[next(iter(keywords))]


def test_a_run_that_cannot_be_called_is_refused_where_the_class_is_written():
    with pytest.raises(
        ConfigError, match=r"agent loop .*Own: declare  async def run\(self, sampling_params, \*\*row\)"
    ):

        class Own(AgentLoopBase):
            async def run(self, messages, sampling_params):  # as in verl 0.5
                """Never called."""


# -- the hooks of ToolAgentLoop ------------------------------------------------------------------------------------


def test_call_tool_is_called_for_every_call_and_what_it_returns_counts():
    seen = []

    class Own(ToolAgentLoop):
        async def _call_tool(self, tool_call, tools_kwargs, agent_data):
            seen.append((tool_call.name, dict(tools_kwargs), agent_data.request_id, len(agent_data.messages)))
            if tool_call.name == "mine":
                return ToolResponse(text="my own"), 0.25, {"own": 1}
            response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs, agent_data)
            return ToolResponse(text=f"<{response.text}>"), reward + 1, metrics

    kwargs = {"echo": {"create_kwargs": {}}}
    trajectory, engine = roll(
        [says(CALL + call("mine") + call("nobody")), says(ANSWER)],
        [tool := Echo(reward=0.5, final=2.0)],
        loop_class=Own,
        row={"tools_kwargs": kwargs},
    )
    assert seen == [(name, kwargs, "r", 3) for name in ("echo", "mine", "nobody")]
    responses = [record.response for record in trajectory.tool_calls]
    assert responses[:2] == ["<seen>", "my own"]
    assert responses[2].startswith("<Unknown tool 'nobody'")
    assert [record.error for record in trajectory.tool_calls] == [None, None, "unknown_tool"]
    assert trajectory.rewards.steps == [(0, "echo", 1.5), (0, "mine", 0.25), (0, "nobody", 1.0)]
    assert trajectory.rewards.final == {"echo": 2.0}
    assert (tool.log["create"], tool.log["execute"], tool.log["release"]) == (1, 1, 1)
    assert "<seen>" in TOKENIZER.decode(engine.asked[1][1])


@pytest.mark.parametrize("arguments", ["tool_call", "tool_call, tools_kwargs", "*args"])
def test_call_tool_of_any_version_is_understood(arguments):
    scope = {"ToolResponse": ToolResponse}
    exec(f"async def hook(self, {arguments}): return ToolResponse(text='mine'), None, None", scope)
    own = type("Own", (ToolAgentLoop,), {"_call_tool": scope["hook"]})
    trajectory, _ = roll([says(CALL), says(ANSWER)], [Echo()], loop_class=own)
    assert [record.response for record in trajectory.tool_calls] == ["mine"]


def test_a_long_answer_of_call_tool_is_cut_like_a_tools():
    class Own(ToolAgentLoop):
        async def _call_tool(self, tool_call, tools_kwargs, agent_data):
            return ToolResponse(text="value " * 300), 0.0, {}

    trajectory, _ = roll(
        [says(CALL), says(ANSWER)], [Echo()], loop_class=Own, multi_turn={"max_tool_response_length": 40}
    )
    assert trajectory.tool_calls[0].response.startswith("value ")
    assert len(TOKENIZER.encode(trajectory.tool_calls[0].response, add_special_tokens=False)) <= 40


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"role": "tool"}, r"agent loop .*Own: _call_tool must return \(ToolResponse, reward, metrics\), not dict"),
        ((3, 0.0, {}), "agent loop .*Own: _call_tool must return its response as a ToolResponse or a str, not int"),
        (("x", "much", {}), "agent loop .*Own: _call_tool returned a str where a number was expected as reward"),
        (("x", float("nan"), {}), "agent loop .*Own: _call_tool returned the reward nan, which is not finite"),
    ],
)  # fmt: skip
def test_what_call_tool_may_not_return_names_the_loop(returned, message):
    class Own(ToolAgentLoop):
        async def _call_tool(self, tool_call, tools_kwargs, agent_data):
            return returned

    with pytest.raises(EtudeError, match=message):
        roll([says(CALL), says(ANSWER)], [Echo()], loop_class=Own)


def test_a_broken_tool_stays_broken_whatever_call_tool_makes_of_it():
    """As in verl, where `_call_tool` tells the model of every exception."""

    class Own(ToolAgentLoop):
        async def _call_tool(self, tool_call, tools_kwargs, agent_data):
            try:
                return await super()._call_tool(tool_call, tools_kwargs, agent_data)
            except Exception as error:
                return ToolResponse(text=f"Error when executing tool: {error}"), 0.0, {}

    def refuse(_):
        raise ConnectionError("gone")

    with pytest.raises(InfrastructureError, match="tool 'echo': execute failed: ConnectionError: gone"):
        roll([says(CALL), says(ANSWER)], [Echo(respond=refuse)], loop_class=Own)


def test_a_call_tool_that_raises_stops_the_others():
    ended = []

    class Own(ToolAgentLoop):
        async def _call_tool(self, tool_call, tools_kwargs, agent_data):
            if tool_call.name == "mine":
                raise KeyError("a bug")
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(tool_call.name)

    with pytest.raises(KeyError, match="a bug"):
        roll([says(CALL + call("mine"))], [Echo()], loop_class=Own)
    assert ended == ["echo"]


def test_the_handlers_of_the_states_may_be_wrapped_as_in_verl():
    seen = []

    class Own(ToolAgentLoop):
        async def _handle_pending_state(self, agent_data, sampling_params):
            state = await super()._handle_pending_state(agent_data, sampling_params)
            seen.append((state, tuple(agent_data.prompt_ids), agent_data.response_mask))
            return state

        async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
            sampling_params = {**sampling_params, "temperature": 0.25 + agent_data.assistant_turns}
            state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
            seen.append((state, agent_data.response_ids, len(agent_data.response_mask), agent_data.assistant_turns))
            agent_data.tool_calls = agent_data.tool_calls[:1]
            return state

        async def _handle_processing_tools_state(self, agent_data):
            state = await super()._handle_processing_tools_state(agent_data)
            agent_data.extra_fields["calls"] = agent_data.user_turns
            agent_data.extra_fields["session"] = object()  # stays here
            seen.append((state, agent_data.tool_rewards))
            return AgentState.TERMINATED if agent_data.user_turns == 2 else state

    turn = says(CALL + CALL)
    trajectory, engine = roll([turn] * 3, [Echo(reward=0.5)], loop_class=Own)
    prompt = tuple(trajectory.prompt_ids)
    assert seen[0] == (AgentState.GENERATING, prompt, ())
    assert seen[1] == (AgentState.PROCESSING_TOOLS, tuple(turn), len(turn), 1)
    assert seen[2] == (AgentState.GENERATING, (0.5,))
    assert [state for state, *_ in seen[3:]] == [AgentState.PROCESSING_TOOLS, AgentState.GENERATING]
    assert [params.temperature for _, _, params in engine.asked] == [0.25, 1.25]
    assert [record.error for record in trajectory.tool_calls] == [None, None]
    assert trajectory.extra_fields == {"calls": 2}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda data: setattr(data, "prompt_ids", [1]),
            "read only here: add tokens with  agent_data.trajectory.append",
        ),
        (lambda data: setattr(data, "tool_rewards", [1.0]), "read only here: add a reward with"),
        (lambda data: data.prompt_ids.append(3), "'tuple' object has no attribute 'append'"),
        (lambda data: data.messages.append({}), "'tuple' object has no attribute 'append'"),
        (lambda data: data.response_mask.extend([0]), "'tuple' object has no attribute 'extend'"),
    ],
)
def test_a_handler_that_writes_tokens_as_in_verl_is_told(act, message):
    class Own(ToolAgentLoop):
        async def _handle_processing_tools_state(self, agent_data):
            act(agent_data)
            return AgentState.TERMINATED

    with pytest.raises((EtudeError, AttributeError), match=message):
        roll([says(CALL)], [Echo()], loop_class=Own)


def test_the_same_names_are_those_of_agent_data():
    """What a handler or tool reads of verl's AgentData is there."""

    class Own(ToolAgentLoop):
        async def _handle_processing_tools_state(self, agent_data):
            missing = [name for name in AgentData.__dataclass_fields__ if not hasattr(agent_data, name)]
            assert missing == []
            agent_data.metrics["own"] = 1.0
            return AgentState.TERMINATED

    assert roll([says(CALL)], [Echo()], loop_class=Own)[0].timings["own"] == 1.0


@pytest.mark.parametrize("name", ["_handle_thinking_state", "_handle_generating", "ct_merge_context_msg"])
def test_hooks_that_nothing_calls_are_refused_by_name(name):
    async def hook(self, *args):
        """Never called."""

    with pytest.raises(ConfigError, match=f"agent loop Own: nothing here calls '{name}'; .*_call_tool, run"):
        type("Own", (ToolAgentLoop,), {name: hook})


def test_an_environment_runs_its_tools_itself():
    async def hook(self, *args):
        """Never called."""

    with pytest.raises(ConfigError, match="agent loop Own: nothing here calls '_call_tool'"):
        type("Own", (EnvAgentLoop,), {"_call_tool": hook})


def test_a_handler_that_returns_no_state_is_told():
    class Own(ToolAgentLoop):
        async def _handle_generating_state(self, agent_data, sampling_params):
            await super()._handle_generating_state(agent_data, sampling_params)

    with pytest.raises(EtudeError, match="Own: a handler returned None, not an AgentState"):
        roll([says(CALL)], [Echo()], loop_class=Own)
