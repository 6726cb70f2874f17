"""Options of on-policy distillation: `distillation`."""

from __future__ import annotations

from typing import Literal

from etude.errors import ConfigError
from etude.options.declare import When, key, options
from etude.options.serving import server_url
from etude.options.types import Count, FreeForm, NonNegative, Positive, PositiveShare, Text

SELF = "self"
DEFAULT = "default"
DISTILLED = When("where distillation.teachers are set", lambda own, run: bool(run.distillation.teachers))
AVERAGED = When("where a teacher is self", lambda own, run: SELF in own.teachers.values())
SERVED = When(
    "where a teacher is a server", lambda own, run: any(is_address(str(name)) for name in own.teachers.values())
)

TOP_K = "forward_kl_topk"


def is_address(teacher: str) -> bool:
    """Whether a teacher is a server rather than a model folder."""
    return teacher.startswith(("http://", "https://"))


@options
class DistillationLossOptions:
    """What is learned from the teachers."""

    loss_mode: Literal["k1", "forward_kl_topk"] = key(
        "k1: the reverse KL's estimate on each sampled token, as its advantage. forward_kl_topk: the forward KL over the "
        "teacher's topk likeliest tokens and all others together, added to the loss.",
        default="k1",
        when=DISTILLED,
        verl_default="k3",
    )
    topk: Count = key(
        "Tokens of each position that a teacher gives the log-probs of. vLLM gives as many as its --max-logprobs says.",
        default=32,
        unit="tokens",
        when=When(
            f"where distillation.teachers are set, with loss_mode={TOP_K}",
            lambda own, run: bool(run.distillation.teachers) and own.loss_mode == TOP_K,
        ),
    )


@options
class DistillationOptions:
    """On-policy distillation: teachers score the policy's own tokens (docs/algorithms.md)."""

    teachers: FreeForm = key(
        "Teacher by data_source: a model folder with the policy's tokenizer, the address of a vLLM server, or self (the "
        "policy's own weights, which need a hint). The key default covers all other rows. Empty: no distillation.",
        default_factory=dict,
    )
    coef: Positive = key(
        "Weight of what the teacher says: of its advantage (k1) or of the forward KL in the loss (forward_kl_topk).",
        default=1.0,
        when=DISTILLED,
    )
    task_coef: NonNegative = key(
        "Weight of the advantage that the estimator makes of the task's rewards. 0: learn from the teacher alone.",
        default=0.0,
        when=DISTILLED,
    )
    hint: Text | None = key(
        "Text that only the teacher reads, after the last user message; {ground_truth} and the row's extra_info keys are "
        "filled in, {solution} with another answer to the prompt that succeeded, {feedback} with the scorer's. Null: "
        "teacher and policy read the same.",
        default=None,
        when=DISTILLED,
    )
    teacher_update_rate: PositiveShare = key(
        "Share of the policy's weights in those of the teacher self at each update: (1 - rate) of its own and rate of the "
        "policy's (SDPO: 0.05). 1: the policy's weights.",
        default=1.0,
        when=AVERAGED,
    )
    teacher_sync_steps: Count = key(
        "Training steps between two updates of the teacher self.", default=1, unit="steps", when=AVERAGED
    )
    server_timeout: Positive = key(
        "Timeout of one request to a teacher's server.", default=300.0, unit="seconds", when=SERVED
    )
    max_concurrent_requests: Count = key("Max requests in flight to each server.", default=64, when=SERVED)
    distillation_loss: DistillationLossOptions = key("", default_factory=DistillationLossOptions)

    def __post_init__(self) -> None:
        for source, teacher in self.teachers.items():
            if not isinstance(teacher, str) or not teacher.strip():
                raise ValueError(f"teachers.{source} must be a model folder, a server address or {SELF}")
            if is_address(teacher):
                try:
                    server_url(teacher)
                except ConfigError as error:
                    raise ValueError(f"teachers.{source}: {error}") from error
        if SELF in self.teachers.values() and self.hint is None:
            raise ValueError(f"the teacher {SELF} needs a hint: without one it has nothing to teach")

    @property
    def alone(self) -> bool:
        """Whether teachers are all that the policy learns from, so that answers need not be compared."""
        return bool(self.teachers) and self.task_coef == 0

    @property
    def lags(self) -> bool:
        """Whether the teacher `self` has weights of its own: an average, or older ones."""
        return SELF in self.teachers.values() and (self.teacher_update_rate < 1 or self.teacher_sync_steps > 1)

    @property
    def topk(self) -> int:
        """Tokens per position whose log-probs are asked of the teachers, beside the sampled one; 0: none."""
        loss = self.distillation_loss
        return loss.topk if self.teachers and loss.loss_mode == TOP_K else 0

    def teacher_of(self, data_source: str) -> str | None:
        """The teacher of a row; None without one."""
        teacher: str | None = self.teachers.get(data_source, self.teachers.get(DEFAULT))
        return teacher
