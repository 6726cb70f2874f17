"""Reward managers: score a finished rollout, passed as a one-row `DataProto`.

Invariant: a score is a finite number that a scorer returned. A scorer that raises, hangs or returns none is an
infrastructure failure, not a bad answer; one that returns a text or a list ends the run. By default a scorer only sees
text that the model sampled: `NaiveRewardManager` decodes the tokens whose `response_mask` is 1, so tool output cannot earn
a reward.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from etude.errors import ConfigError, EtudeError, InfrastructureError, Unjudged, describe_error, one_line
from etude.options.validate import to_options
from etude.registry import Registry, renamed_imports
from etude.rewards import default
from etude.rewards.default import Score, Scorer
from etude.rewards.finite import SCORE, as_score
from etude.rewards.user_functions import declared_arguments, describe_scorer, sees_trajectory, user_function
from etude.rewards.view import TrajectoryView, opening_of
from etude.timeouts import BlockingCalls, gather

if TYPE_CHECKING:
    import torch

    from etude.protocol import DataProto, DataProtoItem

SCORER_SECONDS = 60.0
KEY = "reward_model.reward_kwargs"
_PROMPT_END = 32  # tokens in which a prompt may open a tag
_scorer_threads = BlockingCalls("etude-scorer", limit=128)  # scorers mostly wait for a judge, a sandbox or a service


class RewardResult(TypedDict):
    """The result of `run_single`; the entries of `reward_extra_info` are reported next to the score."""

    reward_score: float
    reward_extra_info: dict[str, Any]


class BoundedScorer:
    """Makes a scorer awaitable with a timeout: it runs in a thread for at most `timeout` seconds, including any
    awaitable that it returns.

    The clock starts when the scorer starts: waiting for a free thread does not count. Subclasses override `_run` to
    execute it elsewhere.
    """

    def __init__(self, scorer: Scorer, timeout: float) -> None:
        self.scorer = scorer
        self._timeout = timeout
        self._sees_trajectory = sees_trajectory(scorer)

    async def __call__(self, **arguments: Any) -> Score:
        """Returns the scorer's result. `trajectory` is passed only if the scorer declares it.

        Raises:
            EtudeError: the scorer raised it, or imports a package that is not installed: the user must act.
            InfrastructureError: any other error of the scorer, or no result within `timeout` seconds.
        """
        if not self._sees_trajectory:
            arguments.pop("trajectory", None)
        where = describe_scorer(self.scorer, arguments.get("data_source"))
        try:
            return await self._run(arguments)
        except EtudeError:
            raise
        except ImportError as error:
            raise ConfigError(f"{where} failed: {one_line(error)}{renamed_imports(error)}") from error
        except Exception as error:
            kind = Unjudged if isinstance(error, Unjudged) else InfrastructureError
            raise kind(f"{where} failed: {describe_error(error)}") from error

    async def _run(self, arguments: dict[str, Any]) -> Score:
        score: Score = await _scorer_threads.call_within(self._timeout, self.scorer, **arguments)
        return score


class AbstractRewardManager(ABC):
    """Scores a whole batch at once."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Returns rewards (batch, response_len), or with `return_dict` {"reward_tensor", "reward_extra_info"}."""


class RewardManagerBase(AbstractRewardManager):
    """Scores each trajectory as soon as it ends; subclasses define `run_single`.

    `compute_score` is always awaitable, whether the wrapped function is sync or async, and times out after `timeout`
    seconds. Constructed by keyword, as `(tokenizer, compute_score)`, or with either of verl's positional signatures:
    `(config, tokenizer, compute_score)` and `(tokenizer, num_examine, compute_score, reward_fn_key)`.
    """

    is_async_reward_score = True
    _class_initialized = False

    def __init__(self, *parts: Any, timeout: float = SCORER_SECONDS, **named: Any) -> None:
        given = _name_parts(parts) | named
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(f"{KEY}.timeout must be a positive number of seconds, not {timeout}")
        self.config = given.pop("config", None)
        self.tokenizer: Any = given.pop("tokenizer", None)
        if not hasattr(self.tokenizer, "decode"):
            raise ConfigError(f"{type(self).__name__} needs a tokenizer, got {type(self.tokenizer).__name__}")
        scorer = given.pop("compute_score", None) or default.compute_score
        if not callable(scorer):
            raise ConfigError(f"{type(self).__name__}: compute_score is not a function but {type(scorer).__name__}")
        if given.pop("reward_fn_key", "data_source") != "data_source":
            raise ConfigError("reward_fn_key: the column data_source picks a row's scorer, no other does")
        self.timeout = float(timeout)
        self.scorer: Scorer = scorer
        self.compute_score = BoundedScorer(scorer, self.timeout)
        self.reward_kwargs = {key: value for key, value in given.items() if key not in _UNUSED}
        self.init_class(self.config, self.tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Called by every `__init__`; a subclass with one-time setup checks `_class_initialized` first."""
        cls._class_initialized = True

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop."""
        return asyncio.get_running_loop()

    @abstractmethod
    async def run_single(self, data: DataProto) -> RewardResult:
        """Scores `data`, a batch of one row."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Scores a whole batch, for callers outside an event loop; each score is placed at its row's last sampled token.

        Args:
            data: `responses` (batch, response_len) and the columns that `run_single` reads. Without `response_mask`, the
                response slice of `attention_mask` is used; without either, every token counts.
            return_dict: also return `reward_extra_info`, each key a list with one entry (or None) per row.
        """
        import torch  # imported lazily: `etude.tools` imports this package and needs no torch

        results = asyncio.run(gather(self.run_single(data[row : row + 1]) for row in range(len(data))))
        mask = _response_mask(data.batch).bool()
        rewards = torch.zeros(mask.shape, dtype=torch.float32)
        for row, result in enumerate(results):
            sampled = mask[row].nonzero()
            if len(sampled):
                rewards[row, int(sampled[-1])] = result["reward_score"]
        if not return_dict:
            return rewards
        keys = dict.fromkeys(key for result in results for key in result["reward_extra_info"])
        info = {key: [result["reward_extra_info"].get(key) for result in results] for key in keys}
        return {"reward_tensor": rewards, "reward_extra_info": info}


def _response_mask(batch: Any) -> torch.Tensor:
    """Returns a mask like `batch["responses"]`, with or without a batch dimension: 1 where a response token counts."""
    import torch

    responses = batch["responses"]
    if "response_mask" in batch.keys():  # noqa: SIM118 (TensorDict does not support `in`)
        return batch["response_mask"]
    if "attention_mask" in batch.keys():  # noqa: SIM118
        return batch["attention_mask"][..., -responses.shape[-1] :]
    return torch.ones_like(responses)


_UNUSED = ("num_examine", "reward_router_address", "reward_model_tokenizer")
"""Arguments of verl's managers that are accepted and ignored: how many answers to print, a reward model's address and
tokenizer."""


def _name_parts(parts: tuple[Any, ...]) -> dict[str, Any]:
    """Maps a manager's positional arguments to names; a tokenizer in first position distinguishes the signatures."""
    names: tuple[str, ...] = ("config", "tokenizer", "compute_score", *_UNUSED[1:])
    if parts and hasattr(parts[0], "decode"):
        has_count = len(parts) > 1 and isinstance(parts[1], int)
        names = ("tokenizer", *(("num_examine",) if has_count else ()), "compute_score", "reward_fn_key")
    if len(parts) > len(names):
        raise ConfigError(f"a reward manager takes {', '.join(names)}, got {len(parts)} arguments")
    return dict(zip(names, parts))


def build_manager(
    name: str,
    *,
    config: Any,
    tokenizer: Any,
    compute_score: Scorer | None,
    reward_kwargs: Mapping[str, Any],
    score_text: ScoreText = "assistant",
) -> AbstractRewardManager:
    """Instantiates the class registered as `name`; the arguments that its `__init__` declares are passed by keyword.

    Args:
        compute_score: the user's function; None for the built-in one.
        score_text: see `NaiveRewardManager`, whose subclasses take it.

    Raises:
        ConfigError: no class has this name; its `__init__` requires an argument that is not provided, does not accept
            one of `reward_kwargs`, the user's function or `score_text`, or raises; its `__call__` would never be used;
            or the user's function takes batches and the class does not.
    """
    cls: Any = REWARD_MANAGERS.get(name)
    where = f"the reward manager '{name}' ({cls.__qualname__})"
    picks_text = issubclass(cls, NaiveRewardManager)
    if score_text != "assistant" and not picks_text:
        raise ConfigError(f"reward_model.score_text={score_text}: {where} decodes the response itself")
    if getattr(user_function(compute_score), "batched", False) and not getattr(cls, "takes_batches", False):
        raise ConfigError(
            f"the custom reward function scores whole batches, which {where} does not",
            fix="set reward_model.reward_manager=batch",
        )
    scores_rows = issubclass(cls, RewardManagerBase)
    if scores_rows and cls.__call__ is not RewardManagerBase.__call__:
        raise ConfigError(
            f"{where} overrides __call__, which a class that has run_single is not called by: derive it from "
            "AbstractRewardManager, or override run_single"
        )
    given = {
        "config": config,
        "tokenizer": tokenizer,
        "compute_score": compute_score or default.compute_score,
        "reward_fn_key": "data_source",
        "score_text": score_text,
        **dict.fromkeys(_UNUSED),
        "num_examine": 0,
    }
    wanted, takes_any = declared_arguments(cls, where, tuple(given), reward_kwargs, KEY)
    if takes_any:  # its **kwargs are passed on to the base class
        wanted |= {"compute_score"} if "tokenizer" in wanted else {"config", "tokenizer", "compute_score"}
        wanted |= {"score_text"} if picks_text else set()
    arguments = {key: value for key, value in given.items() if key in wanted} | dict(reward_kwargs)
    if compute_score is not None and "compute_score" not in arguments:
        raise ConfigError(f"custom_reward_function.path is set, but {where} takes no compute_score")
    try:
        manager: AbstractRewardManager = cls(**arguments)
    except EtudeError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(f"{where} cannot be made: {type(error).__name__}: {one_line(error)}") from error
    return manager


REWARD_MANAGERS: Registry[type[AbstractRewardManager]] = Registry("reward manager")
register = REWARD_MANAGERS.register


ScoreText = Literal["assistant", "final_turn", "full"]


@register("naive")
class NaiveRewardManager(RewardManagerBase):
    """Passes the text of one trajectory to `compute_score`.

    `score_text` selects the text: "assistant", the model's output, turns joined by a newline; "final_turn", its last
    turn only; "full", everything after the prompt, tool responses included. A subclass that executes scorers differently
    sets `runs` to its `BoundedScorer` and the options class of its `reward_kwargs`.
    """

    runs: ClassVar[tuple[Callable[..., BoundedScorer], type[Any]] | None] = None

    def __init__(self, *parts: Any, score_text: ScoreText = "assistant", **named: Any) -> None:
        super().__init__(*parts, **named)
        self.score_text = score_text
        if self.scorer is default.compute_score:
            self.scorer = default.score_row  # the same score, plus the parsed answer
            self.compute_score = BoundedScorer(self.scorer, self.timeout)
        if self.runs is not None:
            bounded, section = self.runs
            self.compute_score = bounded(self.scorer, self.timeout, to_options(section, self.reward_kwargs, KEY))
        if type(self) is NaiveRewardManager and self.reward_kwargs:  # a subclass may have options
            raise ConfigError(f"the reward manager 'naive' has no {KEY}.{next(iter(self.reward_kwargs))}")

    async def run_single(self, data: DataProto) -> RewardResult:
        """Returns the score and details of one row; a plain number is also reported as `acc`.

        Raises:
            ValueError: `data` does not hold exactly one row.
            InfrastructureError: the scorer failed, or its score is not finite.
            ConfigError: its score is no number.
        """
        if len(data) != 1:
            raise ValueError(f"run_single scores one row, not {len(data)}")
        row = data[0]
        assert row.batch is not None
        source = row.non_tensor_batch["data_source"]
        result = await self.compute_score(
            data_source=source,
            solution_str=self._text(row.batch),
            ground_truth=(row.non_tensor_batch.get("reward_model") or {}).get("ground_truth"),
            extra_info=row.non_tensor_batch.get("extra_info") or {},
            trajectory=self._trajectory(row),
        )
        return read_result(result, describe_scorer(self.scorer, source))

    def _trajectory(self, row: DataProtoItem) -> Any:
        view, batch = row.non_tensor_batch.get("trajectory"), row.batch
        if not isinstance(view, TrajectoryView) or "prompts" not in batch.keys():  # noqa: SIM118
            return view
        end = self.tokenizer.decode(batch["prompts"][-_PROMPT_END:].tolist(), skip_special_tokens=True)
        return replace(view, opened=opening_of(end))

    def _text(self, batch: Any) -> str:
        """Returns the text that the scorer gets, as selected by `score_text`."""
        responses, mask = batch["responses"], _response_mask(batch)
        if self.score_text == "full":
            if len(responses) and "attention_mask" in batch.keys():  # noqa: SIM118
                responses = responses[batch["attention_mask"][-responses.shape[-1] :].bool()]
            return self.tokenizer.decode(responses.tolist(), skip_special_tokens=True)
        pairs = zip(responses.tolist(), mask.tolist(), strict=True)
        turns = [[token for token, _ in run] for sampled, run in groupby(pairs, key=lambda pair: pair[1]) if sampled]
        chosen = turns[-1:] if self.score_text == "final_turn" else turns
        return "\n".join(self.tokenizer.decode(turn, skip_special_tokens=True) for turn in chosen)


def read_result(result: object, source: str) -> RewardResult:
    """Converts a scorer's result, a number or a mapping with the key `score`, to a `RewardResult`.

    Raises:
        ConfigError: the score is no number.
        InfrastructureError: there is no score, or it is not finite; the messages begin with `source`.
    """
    details = dict(result) if isinstance(result, Mapping) else {"acc": result}
    value = details.get("score") if isinstance(result, Mapping) else result
    if value is None:
        raise InfrastructureError(f"{source} returned no score: {SCORE}")
    score = as_score(value, source)
    return {"reward_score": score, "reward_extra_info": details if isinstance(result, Mapping) else {"acc": score}}
