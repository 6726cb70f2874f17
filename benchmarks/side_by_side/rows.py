"""The rows to measure: each runs its contenders in alternation, and compares the first with the others.

Invariant: the contenders of a row get the same work. `targets` of a row whose first contender is Étude: figure → the
maximum ratio to the peer that is aimed at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

KINDS = ("step", "pretrained", "rollout", "loop", "update", "dataproto", "startup", "scaling")


@dataclass(frozen=True)
class Contender:
    """A program: the environment it runs in, and the arguments of `python` (a driver's module, or any code)."""

    name: str
    environment: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A comparison; `figures` are the ones to report."""

    kind: str
    name: str
    title: str
    threads: int
    contenders: tuple[Contender, ...]
    figures: tuple[str, ...]
    targets: Mapping[str, float] = field(default_factory=dict)


def rows(kinds: Sequence[str], threads: Sequence[int], model: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of the given kinds and thread counts; `model` are the arguments that name the checkpoint."""
    builders = {
        "step": _step,
        "pretrained": _pretrained,
        "rollout": _rollout,
        "loop": _loop,
        "update": _update,
        "dataproto": _dataproto,
        "startup": _startup,
        "scaling": _scaling,
    }
    for kind in kinds:
        for count in threads if kind in ("step", "rollout", "update") else threads[:1]:
            yield from builders[kind](count, tuple(model))


def _driver(name: str, environment: str, module: str, *arguments: object) -> Contender:
    return Contender(name, environment, ("-m", f"side_by_side.drivers.{module}", *map(str, arguments)))


def _step(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    common = (*model, "--threads", threads)
    yield Row(
        "step",
        f"step_{threads}",
        f"one training step, 8 prompts × 8 answers, two tool turns, {_threads(threads)}",
        threads,
        (
            _driver("Étude", "etude", "etude_step", *common, "--steps", 4),
            _driver("TRL 1.16", "trl", "trl_step", *common, "--steps", 3),
        ),
        (
            "rollout_cpu",
            "update_cpu",
            "step_cpu",
            "rollout_wall",
            "update_wall",
            "step_wall",
            "memory",
            "sampled_tokens",
        ),
        {"rollout_cpu": 0.40, "update_cpu": 0.50, "step_cpu": 0.45, "memory": 0.5}
        if threads == 1
        else {"rollout_wall": 0.40, "update_wall": 0.50, "step_wall": 0.45, "memory": 0.5},
    )


def _pretrained(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    """The step with a model of 135 million parameters: `--checkpoint`, as side_by_side.checkpoint --base makes it."""
    common = (*model, "--threads", threads, "--steps", 1)
    yield Row(
        "pretrained",
        f"pretrained_{threads}",
        f"one training step of SmolLM2-135M, 8 prompts × 8 answers, two tool turns, {_threads(threads)}",
        threads,
        (
            # micro-batches of about as many tokens: with TRL's 64 trajectories at once the logits alone take 15 GB
            _driver("Étude", "etude", "etude_step", *common, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048"),
            _driver("TRL 1.16", "trl", "trl_step", *common, "--micro", 4),
        ),
        ("rollout_cpu", "update_cpu", "step_cpu", "memory", "sampled_tokens"),
        {"rollout_cpu": 0.25, "update_cpu": 0.15, "memory": 0.35},
    )


def _rollout(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    for milliseconds in (50, 500):
        tools = (*model, "--threads", threads, "--tool-seconds", milliseconds / 1000, "--tool-failures", 0.05)
        yield Row(
            "rollout",
            f"rollout_{milliseconds}ms_{threads}",
            f"one rollout, tool calls of {milliseconds} ms (log-normal), 5 % of them fail, {_threads(threads)}",
            threads,
            (
                _driver("Étude", "etude", "etude_latency", *tools),
                _driver("TRL 1.16", "trl", "trl_step", *tools, "--steps", 1, "--rollout-only"),
            ),
            ("rollout_wall", "rollout_cpu", "over_bound", "tool_calls"),
            {"rollout_wall": 0.15} if milliseconds == 500 else {},
        )


def _loop(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    for count in (64, 256, 1024):
        yield _loop_row("loop", f"loop_{count}", f"{count} trajectories over a model of 20 ms a call", count, 3, model)


def _loop_row(kind: str, name: str, title: str, count: int, turns: int, model: tuple[str, ...]) -> Row:
    checkpoint = ("--checkpoint", model[model.index("--checkpoint") + 1])
    common = (*checkpoint, "--trajectories", count, "--turns", turns)
    return Row(
        kind,
        name,
        f"{title}, {turns} tool turns",
        1,
        (
            _driver("Étude", "etude", "loop", "etude", *common),
            _driver("plain loop", "etude", "loop", "plain", *common),
            _driver("verl 0.9.1", "verl", "loop", "verl", *common, "--runs", 1),
        ),
        ("cpu_a_call", "wall", "ideal_wall", "memory"),
    )


def _update(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    for group, title in ((1, "unrelated sequences"), (8, "answers to 4 prompts")):
        common = ("--threads", threads, "--group", group)
        yield Row(
            "update",
            f"update_{group}_{threads}",
            f"log-probs and update, 32 {title}, vocabulary 32,000, {_threads(threads)}",
            threads,
            (
                _driver("Étude", "etude", "update", "etude", *common),
                _driver("padded full logits", "etude", "update", "padded", *common, "--runs", 1),
                _driver("TRL 1.16's fused head", "trl", "update", "trl", *common, "--runs", 1),
            ),
            ("log_probs_cpu", "update_cpu", "log_probs_wall", "update_wall", "memory"),
        )


def _dataproto(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    operations = ("select", "union", "chunk", "concat", "repeat", "reorder", "half_the_rows", "pickle_round_trip")
    yield Row(
        "dataproto",
        "dataproto",
        "DataProto, 1,024 rows of 2,048 tokens, 96 MiB (CPU milliseconds)",
        1,
        (
            _driver("Étude", "etude", "dataproto", "etude", "--ray"),
            _driver("verl 0.9.1", "verl", "dataproto", "verl", "--ray"),
        ),
        (*(f"{name}_cpu" for name in (*operations, "ray_put_get")), "ray_put_get_wall"),
    )


def _startup(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    yield _whole(
        "startup_import",
        "import of the trainer",
        Contender("Étude", "etude", ("-c", "from etude.trainer.ppo import PPOTrainer")),
        Contender("TRL 1.16", "trl", ("-c", "from trl import GRPOConfig, GRPOTrainer")),
        Contender("verl 0.9.1", "verl", ("-c", "from verl.trainer.ppo.ray_trainer import RayPPOTrainer")),
    )
    yield _whole(
        "startup_help",
        "`--help` of the command",
        Contender("Étude", "etude", ("-m", "etude.cli.main", "--help")),
        Contender(
            "TRL 1.16", "trl", ("-c", "import sys; from trl.cli.main import main; sys.argv[1:] = ['--help']; main()")
        ),
        Contender("verl 0.9.1", "verl", ("-m", "verl.trainer.main_ppo", "--help")),
    )
    yield _whole(
        "startup_first_step",
        "from nothing to the end of the first training step",
        _driver("Étude", "etude", "etude_step", *model, "--steps", 1),
        _driver("TRL 1.16", "trl", "trl_step", *model, "--steps", 1),
    )


def _whole(name: str, title: str, *contenders: Contender) -> Row:
    return Row("startup", name, f"{title}, the whole process", 1, contenders, ("process_cpu", "process_wall"))


def _scaling(threads: int, model: tuple[str, ...]) -> Iterator[Row]:
    yield Row(
        "scaling",
        "tokens",
        "rollouts of 64, 256 and 1,024 trajectories, two tool turns, one thread; a first one is not counted",
        1,
        tuple(
            _driver(f"Étude, {count:,}", "etude", "etude_step", *model, "--prompts", count // 8, *_rounds(count // 8))
            for count in (64, 256, 1024)
        ),
        ("cpu_a_token", "sampled_tokens"),
    )
    for prompts in (2, 8, 32, 128):
        common = (*model, "--prompts", prompts, *_rounds(prompts))
        contenders = [_driver("Étude", "etude", "etude_step", *common)]
        if prompts <= 32:
            contenders.append(_driver("TRL 1.16", "trl", "trl_step", *common))
        figures = ("cpu_a_token", "rollout_cpu", "sampled_tokens")
        yield Row(
            "scaling",
            f"batch_{8 * prompts}",
            f"rollout of {8 * prompts} trajectories, two tool turns",
            1,
            tuple(contenders),
            figures,
        )
    for tokens in (32, 128, 512):
        common = (*model, "--endless", tokens, "--steps", 2)
        yield Row(
            "scaling",
            f"length_{tokens}",
            f"step with 64 answers of {tokens} tokens, no tools",
            1,
            (_driver("Étude", "etude", "etude_step", *common), _driver("TRL 1.16", "trl", "trl_step", *common)),
            ("rollout_cpu", "update_cpu", "cpu_a_token", "memory"),
        )
    for turns in (1, 7):
        yield _loop_row("scaling", f"turns_{turns}", "256 trajectories over a model of 20 ms a call", 256, turns, model)


def _rounds(prompts: int) -> tuple[object, ...]:
    """Returns the driver's arguments for rollouts only: more of them for smaller batches, so that all take about as
    long. The first is not counted, since only a fresh process pays its start-up costs."""
    return "--rollout-only", "--steps", max(2, min(6, 1 + 64 // prompts))


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"
