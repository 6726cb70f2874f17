"""`Trajectory`: one sequence of a rollout, with the provenance of every token; `Rollout`: the outcome of one row;
`RoutedExperts`: where a mixture-of-experts model sent the tokens.

Agent loops return trajectories, the manager puts those of a row into a `Rollout`, and rollouts feed the batch, the scorer,
the metrics and the dump. `AgentLoopOutput` is a flat form that a user's loop may return instead, as in verl; it is
converted to a trajectory on return.

Invariant: the concatenation of the segments' token ids is exactly what followed the prompt in the model's context, and
`response_mask` is 1 precisely where a segment's provenance is `SAMPLED`. Masks are never derived from text, and tokens are
never re-tokenized. A rollout has sequences, or a reason why it has none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from array import array

    from etude.schemas import ImageInput


class Provenance(str, Enum):
    """Where a token comes from: sampled by the policy, the chat template, a tool, or a user (an interaction)."""

    SAMPLED = "sampled"
    TEMPLATE = "template"
    TOOL = "tool"
    USER = "user"


Run: TypeAlias = tuple[list[int], Provenance]
"""Token ids with one provenance. The mask needs to know only which were sampled; who wrote the others is for dumps, the
viewer and exports."""


class StopReason(str, Enum):
    """Why a trajectory ended."""

    COMPLETED = "completed"  # the model answered without calling a tool
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    MAX_USER_TURNS = "max_user_turns"
    RESPONSE_LENGTH = "response_length"  # no room left in data.max_response_length
    CONTEXT_LENGTH = "context_length"  # no room left in the context window: rollout.max_model_len or the engine's limit
    TURN_LENGTH = "turn_length"  # a turn was truncated at multi_turn.max_turn_tokens, or by its request's max_tokens
    TRAJECTORY_LENGTH = "trajectory_length"  # multi_turn.max_trajectory_tokens have been sampled
    TOOL_RESPONSE_OVERFLOW = "tool_response_overflow"  # the next tool message would not have fit
    TIME_LIMIT = "time_limit"  # multi_turn.max_seconds
    MALFORMED_CALL = "malformed_call"  # where multi_turn.malformed_calls is "end"
    MAX_MALFORMED_CALLS = "max_malformed_calls"  # multi_turn.max_consecutive_malformed_calls
    PROMPT_TOO_LONG = "prompt_too_long"
    CONTEXT_REFUSED = "context_refused"  # the chat template cannot render the tool responses; dropped
    AGENT_ERROR = "agent_error"  # an agent behind the gateway raised an error; dropped if it left no reward
    INFRASTRUCTURE = "infrastructure"  # dropped after its retries, never trained on
    CANCELLED = "cancelled"


TRUNCATED = (
    StopReason.RESPONSE_LENGTH,
    StopReason.CONTEXT_LENGTH,
    StopReason.TURN_LENGTH,
    StopReason.TRAJECTORY_LENGTH,
    StopReason.TOOL_RESPONSE_OVERFLOW,
)
"""Stop reasons of a trajectory truncated by a token limit."""


KEPT_IDS = "kept_ids"
GRAMMAR = "grammar"
"""The column of a batch that holds each row's `Trajectory.kept_ids`; only present if top-k, top-p,
a grammar or score centering was on."""
Kept: TypeAlias = "array[int] | bytes | Head"
"""Ids in ascending order, or, where that is smaller, a bit for each id of the vocabulary, the lowest of a byte first; with
score centering a `Head` that has these."""
KeptIds: TypeAlias = tuple["Kept | None", ...]
"""For each token the ids that it was sampled from, which top-k, top-p or a grammar left; None: the whole vocabulary."""


class Head(NamedTuple):
    """The head of the distribution that a token was sampled from, for score centering: the most probable ids with their
    log-probs; `kept` is what there is in its place without score centering."""

    kept: array[int] | bytes | None
    ids: array[int]
    log_probs: array[float]


class Segment(NamedTuple):
    """A run of tokens of one provenance.

    For sampled segments `log_probs` has one entry per token (natural log, of the distribution sampled from), and so have
    `weight_versions` and, where top-k, top-p or a grammar restricted that distribution, `kept_ids`; otherwise they are None.
    `turn` is the number of the assistant turn, from 0; of tokens that were not sampled, that of the turn which they lead
    to. No two sequences of a rollout that have one role share a number.
    """

    token_ids: tuple[int, ...]
    provenance: Provenance
    turn: int
    log_probs: tuple[float, ...] | None = None
    weight_versions: tuple[int, ...] | None = None
    kept_ids: KeptIds | None = None

    def checked(self) -> Segment:
        """Returns this segment after validation.

        Raises:
            ValueError: the number of log-probs, weight versions or kept ids is not that of tokens.
        """
        per_token = (
            ("log-probs", self.log_probs),
            ("weight versions", self.weight_versions),
            ("kept ids", self.kept_ids),
        )
        for name, values in per_token:
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(f"{len(values)} {name} for {len(self.token_ids)} tokens")
        return self


@dataclass(frozen=True)
class ToolCallRecord:
    """One executed (or refused) tool call: arguments, response, duration.

    `error` is None, "tool" (the tool raised `ToolError`), "exception", "invalid_arguments" (of a known tool),
    "unknown_tool", "malformed", "not_executed" (over the limit of calls per turn, or of a turn that a length limit ended),
    or, for a call that ended its trajectory, "timeout" or "infrastructure".
    """

    turn: int
    name: str
    arguments: str
    response: str
    reward: float = 0.0
    seconds: float = 0.0
    error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    source: str = "tool"  # "tool" | "cache" | "shared" | "replay" | "fault"; of a gateway: "agent" | "unanswered"
    retries: int = 0  # attempts before the last one that failed for infrastructure reasons
    timeouts: int = 0  # attempts that timed out
    blocked_loop: int = 0  # number of times it blocked the event loop
    cut: bool = False  # shown shorter than the tool's own limits allow, as there was no room for more


def role_name(role: str) -> str:
    """The name in a role: that of `solver/3` is `solver`."""
    return role.partition("/")[0]


def plain_numbers(details: Mapping[str, Any]) -> dict[str, Any]:
    """Copies what a scorer reports, with scalars of NumPy and torch as Python's: `np.bool_(False)` is a verdict, too."""
    return {
        name: value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
        for name, value in details.items()
    }


@dataclass
class Rewards:
    """A trajectory's rewards by source.

    `steps` holds (assistant turn, tool name, value) for every reward that a tool's `execute` returned, `final` the value of
    each tool's `calc_reward`, `score` the reward manager's score (None if no manager ran).
    """

    steps: list[tuple[int, str, float]] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    score_info: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return bool(self.steps or self.final) or self.score is not None

    def succeeded(self, total: float) -> bool:
        """Whether the scorer's `acc` is at least 1; without `acc`, whether the weighted `total` is."""
        acc = self.score_info.get("acc")
        return (acc if isinstance(acc, bool | int | float) else total) >= 1

    def total(self, tool_weight: float = 1.0, score_weight: float = 1.0) -> float:
        """tool_weight · (Σ step rewards + Σ calc_reward) + score_weight · score."""
        tools = sum(value for _, _, value in self.steps) + sum(self.final.values())
        return tool_weight * tools + score_weight * (self.score or 0.0)


@dataclass
class Trajectory:
    """One sequence of a rollout, usually the only one. Times are in seconds; `timings` holds sums by activity,
    `timeline` each activity with its start (Unix time) and duration.

    `sampling` holds the temperature, top_p and top_k that its tokens were sampled with, where the manager knows them.
    `extra_fields` are additional fields from its loop; the scorer gets them in `extra_info`. `images` are the images of its
    context, in the order of their placeholders in `prompt_ids` and the segments, and of the image parts of `messages`. If it
    ended before its last messages reached the model (after tools or a user), they are still in `messages`, as text only:
    `[image]` for each image. `routed_experts` are the expert choices for its context, where the engine records them. `role`
    says which of several agents it is of (see `etude.agents.roles`).

    Of several sequences of a rollout, `first_turn` is the number of its own first turn, so that `assistant_turns` counts on
    from there, and `kept_turns` are the numbers of the earlier turns that its messages still have.
    """

    request_id: str
    prompt_ids: list[int]
    segments: list[Segment] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    rewards: Rewards = field(default_factory=Rewards)
    stop_reason: StopReason = StopReason.COMPLETED
    assistant_turns: int = 0
    user_turns: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    timeline: list[tuple[str, float, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    sampling: dict[str, float] = field(default_factory=dict)
    images: list[ImageInput] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    routed_experts: RoutedExperts | None = None
    role: str = ""
    first_turn: int = 0
    kept_turns: list[int] = field(default_factory=list)

    def append(
        self,
        token_ids: Sequence[int],
        provenance: Provenance,
        *,
        log_probs: Sequence[float] | None = None,
        weight_versions: Sequence[int] | None = None,
    ) -> None:
        """Appends tokens to the context as one segment; no tokens, no segment.

        Raises:
            ValueError: the numbers of log-probs and tokens differ.
        """
        versions = None if weight_versions is None else tuple(weight_versions)
        probs = None if log_probs is None else tuple(log_probs)
        segment = Segment(tuple(token_ids), provenance, self.assistant_turns, probs, versions).checked()
        if segment.token_ids:
            self.segments.append(segment)

    def add_time(self, activity: str, seconds: float) -> None:
        """Adds an activity that has just ended."""
        self.timings[activity] = self.timings.get(activity, 0.0) + seconds
        self.timeline.append((activity, time.time() - seconds, seconds))

    def add_step_reward(self, source: str, value: float, turn: int | None = None) -> None:
        """Adds a step reward for the last assistant turn, or for `turn`; `source` names its giver, usually a tool."""
        self.rewards.steps.append((self.assistant_turns - 1 if turn is None else turn, source, value))

    @property
    def reward_score(self) -> float | None:
        """Alias of `rewards.score`, under its name in `AgentLoopOutput`."""
        return self.rewards.score

    @reward_score.setter
    def reward_score(self, value: float | None) -> None:
        self.rewards.score = value

    @property
    def response_ids(self) -> list[int]:
        """All ids after the prompt."""
        return list(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def response_mask(self) -> list[int]:
        """1 where the policy sampled the token, 0 elsewhere."""
        return list(
            chain.from_iterable([int(s.provenance is Provenance.SAMPLED)] * len(s.token_ids) for s in self.segments)
        )

    @property
    def response_log_probs(self) -> list[float]:
        """Log-probs of the sampled tokens, 0.0 elsewhere."""
        parts = (each.checked().log_probs or (0.0,) * len(each.token_ids) for each in self.segments)
        return list(chain.from_iterable(parts))

    @property
    def kept_ids(self) -> KeptIds:
        """For each id after the prompt the ids that it was sampled from; empty if no segment has any."""
        if all(segment.kept_ids is None for segment in self.segments):
            return ()
        return tuple(kept for each in self.segments for kept in each.kept_ids or (None,) * len(each.token_ids))

    @property
    def response_length(self) -> int:
        """Number of ids after the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments)

    def context_ids(self) -> list[int]:
        """The whole context: prompt ids plus response ids."""
        return self.prompt_ids + self.response_ids

    @property
    def num_turns(self) -> int:
        """The prompt, the model's turns, summaries included, and the turns of tools or a user that answer them."""
        return self.user_turns + self.assistant_turns + 1

    @property
    def message_turns(self) -> list[int]:
        """The turn numbers of the model's messages in `messages`, which are the last assistant messages there."""
        return [*self.kept_turns, *range(self.first_turn, self.assistant_turns)]

    def turn_ends(self) -> dict[int, int]:
        """Maps each assistant turn to the response position of its last sampled token."""
        ends: dict[int, int] = {}
        position = 0
        for segment in self.segments:
            position += len(segment.token_ids)
            if segment.provenance is Provenance.SAMPLED:
                ends[segment.turn] = position - 1
        return ends

    def token_level_scores(self, tool_weight: float = 1.0, score_weight: float = 1.0) -> list[float]:
        """Rewards per response token: each step reward at the end of its turn, the rest on the last sampled token."""
        return Rollout([self]).token_level_scores(tool_weight, score_weight)[0]

    def to_output(self) -> AgentLoopOutput:
        """Converts to the flat form."""
        return AgentLoopOutput(
            prompt_ids=list(self.prompt_ids),
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_log_probs,
            num_turns=self.num_turns,
            metrics=dict(self.timings),
            trajectory=self,
            images=tuple(self.images),
        )

    def to_record(self) -> dict[str, Any]:
        """Converts to a JSON-serialisable dict, for rollout dumps. Of what a grammar left of each token's choices, a segment
        says only that there was one (`grammar`)."""
        whole = self.sampling.get("top_p", 1.0) == 1.0 and self.sampling.get("top_k", -1) <= 0
        return {
            "request_id": self.request_id,
            "prompt_ids": list(self.prompt_ids),
            "segments": [
                {k: v for k, v in s._asdict().items() if v is not None and k != KEPT_IDS}
                | {"provenance": s.provenance.value}
                | ({GRAMMAR: True} if whole and any(kept is not None for kept in s.kept_ids or ()) else {})
                for s in self.segments
            ],
            "messages": self.messages,
            "tool_calls": [asdict(call) for call in self.tool_calls],
            "rewards": asdict(self.rewards),
            "stop_reason": self.stop_reason.value,
            "num_turns": self.num_turns,
            "timings": self.timings,
            "sampling": self.sampling,
        } | {
            name: value
            for name, value in (
                ("images", [image.to_record() for image in self.images]),
                ("extra_fields", self.extra_fields),
                ("role", self.role),
                ("first_turn", self.first_turn),
                ("kept_turns", self.kept_turns),
                ("timeline", [(name, round(start, 4), round(length, 4)) for name, start, length in self.timeline]),
            )
            if value
        }


@dataclass
class Rollout:
    """The outcome of one row: its sequences, or why there are none.

    `sequences` are in time order. Only the last, the main one, carries rewards, messages and stop reason; the earlier ones
    were abandoned when the agent rewrote its history, or are of another role, and then the last of a role may carry
    rewards of its own. A dropped rollout has none. `attempts` counts runs, `failures` the
    infrastructure failures (of runs, and of scoring a finished run), `stalls` the failures that were stalls; `cause` is the
    last failure in one line. `broken_calls` are the tool calls that ended a failed run, whose trajectory is discarded.
    `judge_usage` is what judges used for this rollout (see `etude.rewards.usage`).
    """

    sequences: list[Trajectory] = field(default_factory=list)
    attempts: int = 1
    failures: int = 0
    stalls: int = 0
    dropped: StopReason | None = None
    cause: str = ""
    broken_calls: list[ToolCallRecord] = field(default_factory=list)
    judge_usage: Counter[str] = field(default_factory=Counter)

    @property
    def trajectory(self) -> Trajectory | None:
        """The main sequence; None if the rollout was dropped."""
        return self.sequences[-1] if self.sequences else None

    @property
    def earlier(self) -> list[Trajectory]:
        """The sequences before the main one."""
        return self.sequences[:-1]

    def whole(self) -> Trajectory | None:
        """The main sequence with the tool calls and the number of turns of all sequences, to be counted."""
        if not self.earlier:
            return self.trajectory
        main = self.sequences[-1]
        # A conversation that was compacted counts its users' turns on; a gateway's sequence has those of its own.
        answering = main.user_turns if main.first_turn else sum(each.user_turns for each in self.sequences)
        return replace(
            main,
            tool_calls=[call for each in self.sequences for call in each.tool_calls],
            first_turn=0,
            assistant_turns=sum(each.assistant_turns - each.first_turn for each in self.sequences),
            user_turns=answering,
        )

    def token_level_scores(self, tool_weight: float = 1.0, score_weight: float = 1.0) -> list[list[float]]:
        """Rewards per response token of each sequence: each step reward at the end of its turn, also if another sequence
        of the role has that; the rest on the last sampled token of the sequence that carries it."""
        scores = [[0.0] * each.response_length for each in self.sequences]
        ends = [each.turn_ends() for each in self.sequences]
        for own, carrier in enumerate(self.sequences):
            if not ends[own]:
                continue
            last, rewards = max(ends[own].values()), carrier.rewards
            peers = [own, *(number for number, each in enumerate(self.sequences) if each.role == carrier.role)]
            for turn, _, value in rewards.steps:
                home = next((number for number in peers if turn in ends[number]), own)
                scores[home][ends[home].get(turn, last)] += tool_weight * value
            scores[own][last] += tool_weight * sum(rewards.final.values()) + score_weight * (rewards.score or 0.0)
        return scores

    def drop(self, reason: StopReason) -> None:
        """Drops the rollout: discards its sequences and records the reason."""
        self.sequences, self.dropped = [], reason


@dataclass
class AgentLoopMetrics:
    """A loop's timings, in seconds; `num_preempted` exists for verl's loops and is not reported."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """What a loop may return instead of a `Trajectory`. `response_mask` is 1 for sampled tokens; the response lists have
    equal lengths; `images` are those last passed to `generate`. If there is a `trajectory`, training uses it: the lists and
    images must match it, and a `reward_score` becomes its score.

    `extra_fields` go to the scorer, in `extra_info`, and to the dump; their `reward_extra_info` is reported next to a
    `reward_score`. The last four fields exist for compatibility with verl and must be empty.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: dict[str, float] | AgentLoopMetrics = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    trajectory: Trajectory | None = None
    images: tuple[ImageInput, ...] = ()
    multi_modal_data: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None
    routed_experts: Any = None

    def to_trajectory(self, request_id: str) -> Trajectory:
        """Returns `trajectory`; if there is none, builds one with a segment for each run of equal mask.

        Raises:
            ValueError: the response lists differ in length, a mask value is not 0 or 1, or the lists differ from
                `trajectory`.
        """
        if self.trajectory is not None:
            self._check_view_of(self.trajectory)
            return self._annotate(self.trajectory)
        lengths = {len(self.response_ids), len(self.response_mask), len(self.response_logprobs or self.response_ids)}
        if len(lengths) != 1 or not set(self.response_mask) <= {0, 1}:
            raise ValueError("response_ids, response_mask (0 or 1) and response_logprobs must have equal lengths")
        trajectory = Trajectory(request_id, list(self.prompt_ids), timings=self._timings(), images=list(self.images))
        position = 0
        for sampled, run in groupby(self.response_mask):
            end = position + len(list(run))
            probs = self.response_logprobs[position:end] if sampled and self.response_logprobs else None
            provenance = Provenance.SAMPLED if sampled else Provenance.TOOL
            trajectory.append(self.response_ids[position:end], provenance, log_probs=probs)
            trajectory.assistant_turns += sampled
            position = end
        trajectory.user_turns = max(self.num_turns - 1 - trajectory.assistant_turns, 0)
        return self._annotate(trajectory)

    def _annotate(self, trajectory: Trajectory) -> Trajectory:
        trajectory.extra_fields |= self.extra_fields
        if self.reward_score is not None:
            trajectory.rewards.score = self.reward_score
            trajectory.rewards.score_info |= plain_numbers(self.extra_fields.get("reward_extra_info") or {})
        return trajectory

    def _timings(self) -> dict[str, float]:
        measured = asdict(self.metrics) if isinstance(self.metrics, AgentLoopMetrics) else self.metrics
        return {name: value for name, value in measured.items() if name != "num_preempted"}

    def _check_view_of(self, trajectory: Trajectory) -> None:
        theirs: dict[str, Sequence[Any]] = {
            "prompt_ids": trajectory.prompt_ids,
            "response_ids": trajectory.response_ids,
            "response_mask": trajectory.response_mask,
            "images": trajectory.images,
        }
        if self.response_logprobs is not None:
            theirs["response_logprobs"] = trajectory.response_log_probs
        for name, values in theirs.items():
            if list(getattr(self, name)) != list(values):
                raise ValueError(
                    f"{name} differs from that of its trajectory, which is used for training: change the trajectory and "
                    "return its to_output(), or set trajectory=None"
                )


ROUTED_EXPERTS = "routed_experts"
"""Batch column: a `RoutedExperts` or None per row, for the row's real (unpadded) tokens from the first on."""


@dataclass(frozen=True)
class RoutedExperts:
    """The experts to which a mixture-of-experts model routed the tokens of a context: a router's choice between nearly equal
    experts depends on rounding, so the engine records its choices and the trainer replays them ("rollout routing replay", Ma
    et al. 2025, arXiv 2510.11370).

    Expert ids (tokens, MoE layers, experts per token), stored in `ids` as int16 bytes, which can be compared, pickled and
    put into columns."""

    ids: bytes
    layers: int
    top_k: int

    @classmethod
    def of(cls, ids: np.ndarray) -> RoutedExperts:
        """Packs ids (tokens, layers, k)."""
        return cls(np.ascontiguousarray(ids, dtype=np.int16).tobytes(), *ids.shape[1:])

    def __len__(self) -> int:
        return len(self.ids) // self._width

    @property
    def _width(self) -> int:
        return 2 * self.layers * self.top_k

    def array(self) -> np.ndarray:
        """Unpacks the ids (tokens, layers, k)."""
        return np.frombuffer(self.ids, dtype=np.int16).reshape(-1, self.layers, self.top_k)

    def first(self, count: int) -> RoutedExperts:
        """The ids of the first `count` tokens, or of fewer if fewer are known."""
        return RoutedExperts(self.ids[: count * self._width], self.layers, self.top_k)

    def extended(self, longer: RoutedExperts | None) -> RoutedExperts:
        """These ids, plus those of `longer` for later tokens: a token keeps the routing that it was first sampled with."""
        if longer is None:
            return self
        return RoutedExperts(self.ids + longer.ids[len(self.ids) :], self.layers, self.top_k)

    def per_token(self, count: int) -> list[bytes]:
        """The ids of `count` tokens, each as bytes; all -1 for a token whose ids are not known."""
        width = self._width
        known = self.ids[: count * width]
        padded = known + b"\xff" * (count * width - len(known))
        return [padded[i : i + width] for i in range(0, len(padded), width)]
