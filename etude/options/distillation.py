"""Options of on-policy distillation: `distillation`."""

from __future__ import annotations

from etude.options.declare import When, key, options
from etude.options.types import Count, FreeForm, NonNegative, Positive, Text

SELF = "self"
DEFAULT = "default"
DISTILLED = When("where distillation.teachers are set", lambda own, run: bool(own.teachers))
SERVED = When(
    "where a teacher is a server", lambda own, run: any(is_address(str(name)) for name in own.teachers.values())
)


def is_address(teacher: str) -> bool:
    """Whether a teacher is a server rather than a model folder."""
    return teacher.startswith(("http://", "https://"))


@options
class DistillationOptions:
    """On-policy distillation: teachers score the policy's own tokens (docs/distillation.md)."""

    teachers: FreeForm = key(
        "Teacher by data_source: a model folder with the policy's tokenizer, the address of a vLLM server, or self (the "
        "policy's own weights, which need a hint). The key default covers all other rows. Empty: no distillation.",
        default_factory=dict,
    )
    coef: Positive = key(
        "Weight of the teacher's advantage: per token, log-prob of the teacher minus that of the policy.",
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
        "filled in. Null: teacher and policy read the same.",
        default=None,
        when=DISTILLED,
    )
    server_timeout: Positive = key(
        "Timeout of one request to a teacher's server.", default=300.0, unit="seconds", when=SERVED
    )
    max_concurrent_requests: Count = key("Max requests in flight to each server.", default=64, when=SERVED)

    def __post_init__(self) -> None:
        for source, teacher in self.teachers.items():
            if not isinstance(teacher, str) or not teacher.strip():
                raise ValueError(f"teachers.{source} must be a model folder, a server address or {SELF}")
        if SELF in self.teachers.values() and self.hint is None:
            raise ValueError(f"the teacher {SELF} needs a hint: without one it has nothing to teach")

    @property
    def alone(self) -> bool:
        """Whether teachers are all that the policy learns from, so that answers need not be compared."""
        return bool(self.teachers) and self.task_coef == 0

    def teacher_of(self, data_source: str) -> str | None:
        """The teacher of a row; None without one."""
        teacher: str | None = self.teachers.get(data_source, self.teachers.get(DEFAULT))
        return teacher
