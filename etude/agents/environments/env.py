"""`Env`: RL-Factory's environment, which produces the observations between the model's turns, and the rewards.

A subclass in a user's file, registered with `@register_env("name")` and selected by `actor_rollout_ref.env.name`, overrides
what it needs: `step`, `get_step_reward`, `_compute_score_with_rules`, `verify_tool`; or, if `reward_model.model.path` is a
language model, the two hooks of its judge, `_get_single_prompt_str` and `_compute_single_score_with_reward_rollout_wg`.

Invariant: all trajectories of a process share an Env; per-trajectory state is kept in its tools. `step` takes a batch: an
agent loop calls it with a batch of one, or, in lockstep, with all trajectories at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.agents.environments.tool_manager import ACTIONS, ANSWER, TOOL_MANAGERS, RenderedPrompt, ToolManager
from etude.chat.control import ControlTokens
from etude.environments import ENVIRONMENTS, TextEnv
from etude.errors import ConfigError

if TYPE_CHECKING:
    from etude.protocol import DataProto, DataProtoItem

__all__ = ["ENVIRONMENTS", "Env", "Step", "TextEnv", "register_env"]

Step = tuple[list[Any], list[bool], list[int], list[int]]
"""(observations, whether each trajectory is over, whether its action was valid, whether it called a tool)."""


class Env:
    """Base class of all environments, usable as it is: it runs the called tools, and an answer ends the trajectory.

    Attributes:
        config: the section `actor_rollout_ref.env` as a mapping.
        tool_manager: parses responses and runs the tools they call.
        use_verify_tool: whether `verify_tool` is called before a score is computed.
        use_process_reward: whether `get_step_reward` is used, at the last token of each turn.
    """

    use_verify_tool = False

    def __init__(self, config: Mapping[str, Any], centralized_actor: Any = None) -> None:
        """`centralized_actor` is accepted for RL-Factory's signature and must be None.

        Raises:
            ConfigError: `config.tool_manager` is not a registered tool manager.
        """
        if centralized_actor is not None:
            raise ConfigError("a centralized tool actor is not needed: a tool's config limits it across processes")
        self.config = config
        made_by = TOOL_MANAGERS.get(config.get("tool_manager") or "adaptive")
        self.tool_manager: ToolManager = made_by(config, config.get("_tools"))
        self.use_process_reward = bool(config.get("use_process_reward"))

    # -- turns -----------------------------------------------------------------------------------------------------

    def step(self, responses: Sequence[str], tokenizer: Any = None) -> Step:
        """Steps the environment with a batch of responses.

        Returns:
            next_obs: what the model sees next: the result of `tool_manager.get_prompt`, a list of messages, or a string,
                which becomes a user message; "" if a trajectory is over.
            dones, valid_action, is_tool: one per response.

        Raises:
            InfrastructureError: infrastructure failed; the trajectory is retried from fresh state.
        """
        return self.observed(*self.tool_manager.execute_actions(responses=responses), tokenizer)

    async def astep(self, responses: Sequence[str], tokenizer: Any = None) -> Step:
        """Async version of `step`, used if neither `step` nor the manager's `execute_actions` is overridden."""
        actions, tools = self.tool_manager.parsed(responses)
        return self.observed(actions, await self.tool_manager.execute_all_tools(actions, tools), tokenizer)

    def observed(self, actions: Sequence[str], results: Sequence[Any], tokenizer: Any = None) -> Step:
        """Builds the four lists of `step` from actions and their results.

        Raises:
            ValueError: an action is not "answer", "error" or "actions".
        """
        next_obs: list[Any] = []
        dones, valid_action, is_tool = [], [], []
        for action, result in zip(actions, results):
            if action not in (ANSWER, ACTIONS, "error"):
                raise ValueError(f"unknown action '{action}': it must be answer, error or actions")
            over = action == ANSWER
            next_obs.append("" if over else self._observation(result, tokenizer))
            dones.append(over)
            valid_action.append(int(action != "error"))
            is_tool.append(int(action == ACTIONS))
        return next_obs, dones, valid_action, is_tool

    def _observation(self, result: Any, tokenizer: Any) -> Any:
        if tokenizer is None:
            return result
        asked: dict[str, Any] = {"input_data": result, "tokenizer": tokenizer, "mode": "tool_call"}
        shown = self.tool_manager.get_prompt(**asked, add_generation_prompt=True)
        if isinstance(shown, str) and not isinstance(shown, RenderedPrompt):
            # An override rendered it: if the text equals the base class's, its messages are known.
            plain = ToolManager.get_prompt(self.tool_manager, **asked, add_generation_prompt=True)
            return plain if plain == shown else shown
        return shown

    # -- rewards ---------------------------------------------------------------------------------------------------

    def get_step_reward(self, responses: Sequence[str], format_score: float = 0.1) -> list[float]:
        """Returns one reward per response, NaN for none; used with `use_process_reward`."""
        return [1.0] * len(responses)

    def verify_tool(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
    ) -> Any:
        """Verifies the whole response with a user's tool; called with `use_verify_tool`. The result is stored in
        `reward_model.ground_truth['verified_results']` for the scorer."""
        raise NotImplementedError(f"{type(self).__name__} sets use_verify_tool and does not define verify_tool")

    def _process_data(self, data_item: DataProtoItem, tokenizer: Any) -> dict[str, Any]:
        """Returns a row of `data` as texts: `prompt_str`, `response_str`, `ground_truth`, `data_source`, `extra_info`.

        `response_str` is what the policy sampled, without special tokens; RL-Factory's has the tools' answers too, in which
        an answer could be found that the model never gave.
        """
        columns, rows = data_item.batch, data_item.non_tensor_batch
        prompt = columns["prompts"][columns["attention_mask"][: len(columns["prompts"])].bool()]
        return {
            "prompt_str": tokenizer.decode(prompt.tolist(), skip_special_tokens=True),
            "response_str": rows["solution_str"],
            "ground_truth": (rows.get("reward_model") or {}).get("ground_truth"),
            "data_source": rows.get("data_source"),
            "extra_info": rows.get("extra_info"),
        }

    def compute_score(
        self,
        reward_rollout_wg: Any,
        reward_tokenizer: Any,
        tokenizer: Any,
        data: DataProto,
        if_val: bool = False,
        use_process_reward: bool = False,
    ) -> list[list[float]]:
        """Returns the scores of each row of `data`: those of its turns, with `use_process_reward`, then the final one.
        `reward_rollout_wg` is the judge, if any, and `reward_tokenizer` its tokenizer."""
        if reward_rollout_wg is not None:
            return self._compute_score_with_reward_rollout_wg(reward_rollout_wg, reward_tokenizer, data)
        final = self._compute_score_with_rules(data, tokenizer, if_val)
        if not use_process_reward:
            return final
        steps: Any = data.non_tensor_batch.get("tool_use_scores", [[]] * len(final))
        return [[*(s for s in row if not math.isnan(s)), *scores] for row, scores in zip(steps, final)]

    def get_prompt_for_reward(self, reward_tokenizer: Any, data: DataProto) -> list[list[str]]:
        """Returns the judge's prompt for each row of `data`, in a list of one; it is about the text that the policy sampled,
        column `solution_str`, in which control tokens of the judge's that it spells out stay text: it can't end its turn."""
        said = ControlTokens(reward_tokenizer).disarm(data.non_tensor_batch["solution_str"].tolist())
        return [
            [self._get_single_prompt_str(source, words, truth, info, reward_tokenizer)]
            for words, (source, truth, info) in zip(said, _judge_fields(data))
        ]

    def _get_single_prompt_str(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, reward_tokenizer: Any
    ) -> str:
        """Returns the judge's prompt for one response, rendered with its chat template."""
        raise ConfigError(f"reward_model.model.path: {type(self).__name__} does not define _get_single_prompt_str")

    def _compute_score_with_reward_rollout_wg(
        self, reward_rollout_wg: Any, reward_tokenizer: Any, data: DataProto
    ) -> list[list[float]]:
        """Returns the judge's score of each row of `data`, parsed from its greedy generations."""
        prompts = self.get_prompt_for_reward(reward_tokenizer, data)
        answers = iter(reward_rollout_wg.generate([prompt for row in prompts for prompt in row]))
        read = self._compute_single_score_with_reward_rollout_wg
        return [
            [read(source, next(answers), truth, info) for _ in row]
            for row, (source, truth, info) in zip(prompts, _judge_fields(data))
        ]

    def _compute_single_score_with_reward_rollout_wg(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
    ) -> float:
        """Parses the score from the judge's generation, passed as `solution_str`."""
        name = "_compute_single_score_with_reward_rollout_wg"
        raise ConfigError(f"reward_model.model.path: {type(self).__name__} does not define {name}")

    def _compute_score_with_rules(self, data: DataProto, tokenizer: Any, if_val: bool = False) -> list[list[float]]:
        """Returns a list of one score for each row; `data` has `prompts`, `responses`, `attention_mask`, `response_mask` and
        the rows' columns (see `_process_data`). The base class gives 0.0."""
        return [[0.0] for _ in range(len(data))]

    @property
    def scores(self) -> bool:
        """Whether this class defines its own score, by rules or a judge's hooks."""
        judging = ("_compute_score_with_reward_rollout_wg", "_compute_single_score_with_reward_rollout_wg")
        hooks = ("compute_score", "_compute_score_with_rules", *judging)
        return any(getattr(type(self), name) is not getattr(Env, name) for name in hooks)


def _judge_fields(data: DataProto) -> Iterator[tuple[str, Any, Any]]:
    """Yields (data source, ground truth, `extra_info`) of each row."""
    columns = data.non_tensor_batch
    for source, rule, info in zip(*(columns[name].tolist() for name in ("data_source", "reward_model", "extra_info"))):
        yield source, (rule or {}).get("ground_truth"), info


register_env = ENVIRONMENTS.register
register_env("base")(Env)
