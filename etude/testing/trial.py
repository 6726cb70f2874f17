"""`TrialRollouts`: rolls out rows exactly as a run would, by a script, by a person or by the model.

Invariant: only the engine differs. Prompts, loop, tools, parser and scorer are the run's; the stand-in plays token ids, and
its tool calls are encoded so that the run's own parser reads them. Infrastructure failures are not retried, so that they
are visible.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.agents import AgentContext, AgentLoopManager
from etude.chat import ToolParser
from etude.chat.parsers.auto import write_call
from etude.checks.setup import Setup, check_options
from etude.config import compose
from etude.inference.scripted import Script, ScriptedEngine
from etude.protocol import DataProto, object_array
from etude.schemas import FunctionCall, example_of
from etude.seeds import group_seed
from etude.tools import BaseTool
from etude.tools.arguments import ArgumentError, decode_arguments
from etude.trainer.rollouts import dump, rollout_batch, rollouts_of
from etude.trajectory import Rollout, ToolCallRecord
from etude.workers import RolloutWorker
from etude.workers.context import ToolCatalogue
from etude.workers.engine_link import EngineLink

LABEL = "trial"


class TrialRollouts(RolloutWorker):
    """A rollout worker whose engine is a script, set for each batch, or after `init_model` the run's own; `seconds` caps the
    time of a trajectory."""

    def __init__(self, setup: Setup, seconds: float) -> None:
        options = setup.options
        rollout = replace(
            options.rollout,
            mode="async",
            infrastructure_retries=0,
            trajectory_timeout=min(seconds, options.rollout.trajectory_timeout),
        )
        alone = replace(options, actor_rollout_ref=replace(options.actor_rollout_ref, rollout=rollout))
        super().__init__(alone, replace(setup.placement, trains=False), rank=0, world_size=1)
        self.__dict__["bundle"] = setup.bundle  # presets the cached property: loaded already

    def roll_out(
        self,
        rows: Sequence[dict[str, Any]],
        script: Script | None,
        *,
        seed: int = 0,
        first: int = 0,
        label: str = LABEL,
        groups: Sequence[int] | None = None,
    ) -> DataProto:
        """Rolls out and scores each row once; rows are numbered from `first`, see `row_number`. `script`: None for the run's
        model, sampled as in a validation. `label`: conversations of another one have other ids. `groups`: the place of each
        row's prompt, where several rows are one prompt's rollouts."""
        prompts = rollout_batch(rows, n=1, label=label, seed=seed, validate=True, first=first)
        if groups is not None:
            prompts.non_tensor_batch["group_seed"] = object_array([group_seed(seed, each) for each in groups])
        if script is not None:
            self._use_script(script)
        return prompts.union(self.generate_sequences(prompts))

    def say_turns(
        self,
        rows: Sequence[dict[str, Any]],
        turns: Sequence[Sequence[list[int]]],
        *,
        first: int = 0,
        label: str = LABEL,
    ) -> list[Rollout]:
        """Rolls out each row with `turns` of its own, of token ids; the last is said again for as long as it goes on."""

        def script(request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
            said = turns[row_number(request_id) - first]
            return said[min(turn, len(said) - 1)]

        return rollouts_of(self.roll_out(rows, script, first=first, label=label))

    async def play(self, rows: Sequence[dict[str, Any]], script: Script, seed: int) -> list[Rollout]:
        """Async form of `roll_out`, for use inside the event loop; returns rollouts instead of a batch."""
        work = self._asked("", rollout_batch(rows, n=1, label=LABEL, seed=seed, validate=True))
        return await self._use_script(script).generate(work.rows, work.sampling)

    def _use_script(self, script: Script) -> AgentLoopManager:
        """Replaces the engine by `script`."""
        engine = ScriptedEngine(script)
        self._manager = AgentLoopManager(self.context, engine, self.scorer)
        self._manager._logged = True  # no warnings: the rollouts record the cause of a failure
        self._link = EngineLink(engine, self.options.rollout, self.context.chat, None, self.dtype)
        return self._manager

    def dump(self, folder: Path, batch: DataProto, step: int = 0) -> None:
        """Dumps a batch returned by `roll_out`, in the format of a run's rollout dumps."""
        dump(self.context.chat, folder, step, batch, self.options.reward_model)

    def total(self, rollout: Rollout) -> float | None:
        """Returns the weighted total reward; None for a dropped rollout."""
        reward, trajectory = self.options.reward_model, rollout.trajectory
        return None if trajectory is None else trajectory.rewards.total(reward.tool_reward_weight, reward.score_weight)

    def say(self, text: str) -> list[int]:
        """Returns the ids of a turn with `text` and the end-of-turn token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return [*ids, self.context.chat.end_of_turn_id]

    def call(self, name: str, arguments: Mapping[str, Any]) -> list[int] | None:
        """Returns the ids of a turn that calls a tool; None if no known format is readable by the run's parser."""
        work = self.call_ids(name, arguments)
        ids: list[int] | None = self._run(work)
        return ids

    async def call_ids(self, name: str, arguments: Mapping[str, Any]) -> list[int] | None:
        """Async form of `call`, for use inside the event loop."""
        context, kwargs = self.context, self.options.data.apply_chat_template_kwargs
        ids = await write_call(context.parser, self.tokenizer, self.schemas, name, arguments, **kwargs)
        if ids is None:
            return None
        stops = set(context.chat.stop_token_ids)
        end = next((place for place, token in enumerate(ids) if token in stops), None)
        return [*ids, context.chat.end_of_turn_id] if end is None else ids[: end + 1]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI schemas of all tools."""
        return [tool.get_openai_tool_schema().to_openai() for tool in tools_of(self.context).values()]

    def read_plain_calls(self) -> None:
        """Switches the loop to the Hermes parser, for a run whose parser's format cannot be written here."""
        parser = ToolParser.get_tool_parser("hermes", self.tokenizer)
        self.__dict__["context"] = replace(self.context, parser=parser)  # overwrites the cached property

    def end(self) -> None:
        """Closes the worker, its tools and its event loop."""
        self.close()
        if not self._loop.is_closed():
            self._loop.close()


def open_trial(
    config_name: str | None, overrides: Sequence[str], config_path: str | Path | None, seconds: float
) -> tuple[TrialRollouts, Setup]:
    """Returns the trial worker, with tools loaded, and the setup of the run that `etude train` would start with these
    arguments.

    Raises:
        ConfigError: the run could not start.
    """
    options = compose(config_name, overrides, config_path, command="train")
    setup = check_options(options)
    worker = TrialRollouts(setup, seconds)
    setup.catalogue = ToolCatalogue.of(worker.context)
    return worker, setup


def row_number(request_id: str) -> int:
    """Returns the number of the row that a request to a scripted engine belongs to."""
    return int(request_id.split("/")[1])


def tools_of(context: AgentContext) -> dict[str, BaseTool]:
    """All tools by name: those of the run, and those of its environments' classes."""
    entries = context.environment.entries.values() if context.environment else ()
    return {**context.tools, **{name: tool for entry in entries for name, tool in entry.tools.items()}}


def example_arguments(context: AgentContext, name: str, number: int = 0) -> dict[str, Any]:
    """Returns arguments that are valid under the tool's schema; for another `number` others, see `example_of`."""
    function = tools_of(context)[name].get_openai_tool_schema().to_openai()["function"]
    made = example_of(function.get("parameters") or {"type": "object"}, number)
    return json.loads(json.dumps(made)) if isinstance(made, dict) else {}


def shown_calls(parser: ToolParser, message: Mapping[str, Any]) -> list[FunctionCall]:
    """The calls of an assistant's message in a prompt, written as text or listed."""
    listed = [call["function"] for call in message.get("tool_calls") or ()]
    given = [each.get("arguments") for each in listed]
    texts = [each if isinstance(each, str) else json.dumps(each or {}) for each in given]
    calls = [FunctionCall(name=each["name"], arguments=text) for each, text in zip(listed, texts)]
    text = message.get("content")
    return [*calls, *(parser.parse(text).calls if isinstance(text, str) else ())]


def worked_examples(context: AgentContext, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Tool → the arguments of its calls in the rows' prompts, each once."""
    found = dict[str, list[dict[str, Any]]]()
    messages = [each for row in rows for each in row["raw_prompt"] if each.get("role") == "assistant"]
    for call in (call for message in messages for call in shown_calls(context.parser, message)):
        with contextlib.suppress(ArgumentError):
            arguments = decode_arguments(call.arguments)
            if arguments not in found.setdefault(call.name, []):
                found[call.name].append(arguments)
    return found


def tool_calls_of(rollouts: Sequence[Rollout]) -> list[ToolCallRecord]:
    """The tool calls of all rollouts that were not dropped."""
    return [call for each in rollouts if each.trajectory for call in each.trajectory.tool_calls]
