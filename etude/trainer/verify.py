"""`verify_step`: makes one update of a finished step again, with the plain trainer, and compares it term by term.

Everything comes from the run's folder: the step's dump, the checkpoint before it, the configuration and the logged metrics;
so it works on another machine. The plain trainer (`etude.plain`) imports nothing of what it checks.

Invariant: terms are compared in the order in which a step computes them, each with what the run itself recorded, so that
the first one that differs is where the fault is, and later ones may differ because of it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from etude.algorithms import ADVANTAGE_ESTIMATORS
from etude.dumps import list_dump_steps, read_rollouts, sequences_of
from etude.errors import ConfigError, DataError, one_line
from etude.models.loading import no_progress_bars
from etude.plain.optimizer import Optimizer
from etude.plain.rollouts import Rollout, total_reward
from etude.plain.rollouts import Sequence as PlainSequence
from etude.plain.trainer import PlainTrainer, Row, load_policy
from etude.run_folder import METRICS_FILE, read_config, read_metrics, read_run_record
from etude.trainer.checkpoints import Checkpoints
from etude.trajectory import GRAMMAR
from etude.workers.checkpoint import MODEL, STATE, read_state

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""By what the model computes in: the largest difference that counts as rounding, relative to what is compared."""

_SMALL = {"loss": 0.1, "gradient norm": 1e-3, "learning rate": 0.0, "weight change": 0.0}
"""A smaller figure is held to what this one is; others to what 1 is."""
_ROUNDING = 0.05  # of a tolerance: how far log-probs and values usually are off
_ROUNDED = 2**-24  # of a float32 weight, by its size: what weight decay alone moves is not much more
_TENSORS = 1e-2  # how far a role's change may be from the plain one: Adam divides small gradients by their own size
_FOLLOWING = ("actor/", "distillation/")  # figures that also are of updates after the first, which moved the policy
_SCORE = "critic/score/of row "  # of a record
_OF_ALL = ("num_turns/", "rollout/stop_reason/", "reward/", "tool/", "env/")  # means over all rollouts of a step
_OF_ADVANTAGES = ("actor/pg_loss", "actor/loss", "actor/grad_norm")
_UPDATED = ("log-prob in the update", "entropy in the update")  # of a later one they depend on the gradients before it
_CLIPPED = ("pg_clipfrac", "vf_clipfrac")  # shares of tokens, one of which rounding may put on the other side

TERMS = {
    "mask": (),
    "text": (),
    "turns": ("num_turns/", "rollout/stop_reason/"),
    "reward": ("reward/", "tool/", "env/", "critic/score/", "critic/rewards/"),
    "old log-prob": ("token:old_log_probs",),
    "reference log-prob": ("token:ref_log_prob",),
    "KL in the reward": ("actor/reward_kl_penalty",),
    "value": ("token:values", "critic/values/"),
    "advantage": ("token:advantages", "critic/advantages/", "critic/returns/"),
    "learning rate": ("actor/lr", "critic/lr"),
    "log-prob in the update": ("token:log_probs",),
    "entropy in the update": ("token:entropys",),
    "ratio": ("actor/ppo_kl", "actor/pg_clipfrac", "rollout_corr/", "training/rollout_probs_diff"),
    "loss": (
        *("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/loss", "distillation/"),
        *("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"),
    ),
    "gradient norm": ("actor/grad_norm", "critic/grad_norm"),
    "weight change": ("actor/weight_change", "critic/weight_change"),
    "written weights": (),
}
"""The terms of a step in the order in which it computes them, with the columns and metrics of each. The log-probs
of a later update than the first depend on the gradients before it."""


@dataclass(frozen=True)
class Term:
    """A term of a step: how many numbers were compared, the largest difference in units of what is allowed, and where it
    is: which number, as logged and plainly."""

    name: str
    compared: int
    excess: float = 0.0
    where: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return self.excess <= 1.0


@dataclass(frozen=True)
class Verification:
    """The terms of a step in their order; those of which the run recorded nothing are left out."""

    step: int
    rollouts: int
    tokens: int
    tolerance: float
    terms: tuple[Term, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Term | None:
        """The first term that differs."""
        return next((term for term in self.terms if not term.equal), None)

    def explain(self) -> str:
        """One line: equal, or which term is not."""
        if self.first is None:
            return f"step {self.step}: equal to {self.tolerance:g}"
        later = [term.name for term in self.terms if not term.equal][1:]
        after = f"; after it also: {', '.join(later)}" if later else ""
        return f"step {self.step}: the {self.first.name} differs: {self.first.where}{after}"


def verify_step(
    run_dir: Path, step: int | None = None, *, device: str = "cpu", logged: Mapping[str, Any] | None = None
) -> Verification:
    """Makes step `step` of the run in `run_dir` again (default: the last that can be), in float64.

    Args:
        logged: the step's metrics; default: those in the run's `metrics.jsonl`.

    Raises:
        ConfigError: the configuration has something that the plain trainer does not do; names the key.
        DataError: the step's dump, metrics or the checkpoint before it is not there.
        CheckpointError: the checkpoint cannot be read.
    """
    config = read_config(run_dir)
    if "actor_rollout_ref" not in config:
        raise ConfigError(f"{run_dir} is no run of `etude train`: it has no step of reinforcement learning to verify")
    check_verifiable(config)
    given = Path(config["trainer"]["rollout_data_dir"] or "rollouts")
    dumps = run_dir / given.name if (run_dir / given.name).is_dir() else given  # it moves with the run's folder
    step = _choose_step(run_dir, dumps, step)
    folder = run_dir / f"global_step_{step - 1}"
    records = list(read_rollouts(dumps / f"{step}.jsonl"))
    if any(record.get("images") for record in records):
        raise ConfigError(f"step {step} has images, which dumps do not keep: it cannot be verified")
    if any(each.get(GRAMMAR) for record in records for own in sequences_of(record) for each in own["segments"]):
        raise ConfigError(
            f"step {step} has tokens sampled under a grammar (a forced call, a response_format), and dumps do not say which "
            "it left: it cannot be verified"
        )
    if logged is None:
        logged = next((each for each in read_metrics(run_dir / METRICS_FILE) if each["step"] == step), None)
    if logged is None:
        raise DataError(f"{run_dir / METRICS_FILE} has no step {step}")
    dtype = _dtype(config, folder)
    with no_progress_bars():
        plain = _open(config, folder, step, dtype, device)
    kl_coef, role_means = plain.kl_coef, dict(plain.role_means)
    try:
        rollouts = [_rollout(record) for record in records]
        figures = plain.step(rollouts)
    except (KeyError, IndexError) as error:
        raise ConfigError(f"step {step} has no plain form: {one_line(error)} is not known to it") from error
    tolerance, notes = TOLERANCES[dtype], []
    if logged.get("rollout/nothing_sampled") or logged.get("prompts/dropped/too_stale"):
        notes.append("some rollouts are not in the dump: means over all of them are not compared")
        figures = {name: value for name, value in figures.items() if not name.startswith(_OF_ALL)}
    if plain.needs_reference and plain.reference is None:
        notes.append("the reference model is not on this machine: its log-probs are those that the run recorded")
    figures |= {f"{_SCORE}{n}": total_reward(each, plain.config["reward_model"]) for n, each in enumerate(rollouts)}
    logged = dict(logged) | {f"{_SCORE}{n}": each["score"] for n, each in enumerate(records) if "score" in each}
    decode = AutoTokenizer.from_pretrained(folder / "actor" / MODEL).decode
    plain.kl_coef, plain.role_means = kl_coef, role_means
    swayed = _sway(plain, tolerance * _ROUNDING)
    found = dict(_compare(records, plain.rows, swayed, figures, logged, tolerance, decode))
    compared = tuple(source for sources in TERMS.values() for source in sources)
    if lost := sorted(each for each in figures.keys() - logged.keys() if each.startswith(compared)):
        notes.append(f"not recorded, so not compared: {', '.join(lost)}")
    after = run_dir / f"global_step_{step}"
    if (after / "trainer.json").is_file():
        changed = _compare_weights(plain, folder, after, dtype)
        found["weight change"] = max(found.get("weight change", changed), changed, key=lambda term: term.excess)
    else:
        notes.append(f"there is no {after.name}: of the weights only how far they moved is compared")
    written = [
        gap for each in (folder, after) if (each / "trainer.json").is_file() for gap in _written_weights(each, dtype)
    ]
    found["written weights"] = _worst("written weights", len(written), written)
    order = list(TERMS)
    if figures.get("actor/optimizer_steps", 1) > 1:
        order = [name for name in TERMS if name not in _UPDATED]
        order[order.index("weight change") : order.index("weight change")] = _UPDATED
    terms = tuple(found[name] for name in order if name in found)
    return Verification(step, len(records), sum(map(len, plain.rows)), tolerance, terms, tuple(notes))


def check_verifiable(config: Mapping[str, Any], key: str = "") -> None:
    """Raises ConfigError if the configuration (a plain dict) has something that the plain trainer does not do; `key` is the
    one that asks for verification."""
    actor, algorithm = config["actor_rollout_ref"], config["algorithm"]
    rollout, teachers = actor["rollout"], config["distillation"]["teachers"]
    top_k, estimator = rollout.get("top_k", -1), ADVANTAGE_ESTIMATORS.find(str(algorithm["adv_estimator"]))
    unknown = {
        "algorithm.adv_estimator": estimator is not None and "reward_baselines" in estimator.needs,  # not in the dump
        "actor_rollout_ref.model.lora_rank": bool(actor["model"].get("lora_rank")),
        "critic.model.lora_rank": bool(config["critic"]["model"].get("lora_rank")),
        "actor_rollout_ref.rollout.top_p": rollout.get("top_p", 1.0) != 1.0,  # nor which tokens were left
        "actor_rollout_ref.rollout.top_k": top_k is not None and top_k > 0,
        "algorithm.rollout_correction.score_centering_topk": bool(
            algorithm["rollout_correction"].get("score_centering_topk")  # nor what was likely
        ),
        "distillation.teachers": bool(teachers) and list(teachers) != ["default"],
    }
    for role, given in (("actor_rollout_ref.actor", actor["actor"]), ("critic", config["critic"])):
        unknown[f"{role}.optim.name"] = given["optim"]["name"] in ("adamw_8bit", "adamw_schedule_free")
    wrong = next((name for name, is_unknown in unknown.items() if is_unknown), None)
    if wrong is not None:
        value = config
        for part in wrong.split("."):
            value = value[part]
        asks = f"{key}: " if key else ""
        raise ConfigError(f"{asks}steps with {wrong}={value} cannot be verified: the plain trainer has no such thing")
    if key and not config["trainer"]["rollout_data_dir"]:
        raise ConfigError(f"{key} needs the dumps", fix="set trainer.rollout_data_dir", key="trainer.rollout_data_dir")


def use_threads_of(run_dir: Path) -> None:
    """Computes with as many threads as the run did, if its configuration says."""
    if threads := read_config(run_dir)["trainer"].get("num_threads"):
        torch.set_num_threads(threads)


def _choose_step(run_dir: Path, dumps: Path, step: int | None) -> int:
    steps = [n for n in list_dump_steps(dumps) if (run_dir / f"global_step_{n - 1}" / "trainer.json").is_file()]
    if not steps:
        raise DataError(
            f"{run_dir} has no step with a dump and the checkpoint before it",
            fix="set trainer.rollout_data_dir, and trainer.save_freq or trainer.verify_every",
        )
    if step is None:
        return steps[-1]
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise DataError(f"step {step} has no dump, or no checkpoint before it; those that have both: {known}")
    return step


def _dtype(config: Mapping[str, Any], folder: Path) -> str:
    """What the model computed in; `auto` is what the checkpoint was written in."""
    named = str(config["actor_rollout_ref"]["model"]["dtype"])
    if named == "auto":
        written = json.loads((folder / "actor" / MODEL / "config.json").read_text())
        named = str(written.get("dtype") or written.get("torch_dtype"))
    return named if named in TOLERANCES else "float32"


def _open(config: dict[str, Any], folder: Path, step: int, dtype: str, device: str) -> PlainTrainer:
    """The plain trainer after `step` - 1 steps: weights, optimizers and KL coefficient are those of `folder`."""
    state = Checkpoints.read_state(folder)
    config = copy.deepcopy(config)
    if config["trainer"]["total_training_steps"] is None:  # known to the trainer, which counted its batches
        total = read_run_record(folder.parent).get("total_steps")
        if not total:
            raise ConfigError(
                f"{folder.parent} does not say how many steps it has: give its config.yaml total_training_steps"
            )
        config["trainer"]["total_training_steps"] = int(total)
    plain = PlainTrainer(config, folder, device)
    plain.steps = step - 1
    if state.get("kl_coef") is not None:
        plain.kl_coef = float(state["kl_coef"])
    plain.role_means = dict(state.get("role_means", {}))
    for role, (model, optimizer) in plain.roles().items():
        _restore(model, optimizer, read_state(folder / role / STATE), getattr(torch, dtype))
    return plain


@torch.no_grad()
def _restore(
    model: torch.nn.Module, optimizer: Optimizer, state: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Puts a checkpoint's weights, as the model computes with them, and the optimizer's state in place."""
    for name, parameter in model.named_parameters():
        parameter.copy_(state[f"model.{name}"].to(dtype))
        for kind, field, target in (
            ("AdamW", "exp_avg", optimizer.first),
            ("AdamW", "exp_avg_sq", optimizer.second),
            ("Muon", "momentum_buffer", optimizer.first),
        ):
            if (found := state.get(f"optimizer.{kind}.{name}.{field}")) is not None:
                target[name].copy_(found)
        if (updates := state.get(f"optimizer.AdamW.{name}.step")) is not None:
            optimizer.updates = int(updates)


def _rollout(record: Mapping[str, Any]) -> Rollout:
    """A dump's record as the plain trainer reads it, from its segments alone."""
    rewards, environment = record["rewards"], record.get("extra_fields", {}).get("environment", {})
    sequences = sequences_of(record)
    turns = [int(each["num_turns"]) - 1 - int(each.get("first_turn", 0)) for each in sequences]
    return Rollout(
        uid=str(record["uid"]),
        sequences=[_sequence(each) for each in sequences],
        step_rewards=[(int(turn), str(tool), float(value)) for turn, tool, value in rewards["steps"]],
        final_rewards={tool: float(value) for tool, value in rewards["final"].items()},
        score=rewards.get("score"),
        accuracy=(rewards.get("score_info") or {}).get("acc"),
        num_turns=int(record["num_turns"])
        if record.get("first_turn")
        else 1 + sum(turns),  # the former: it was compacted
        stop_reason=str(record["stop_reason"]),
        source=str(record.get("data_source")),
        environment=environment.get("name", ""),
        reported=environment.get("metrics", {}),
    )


def _sequence(record: Mapping[str, Any]) -> PlainSequence:
    runs = [(each, len(each["token_ids"]), each["provenance"] == "sampled") for each in record["segments"]]
    recorded = (record.get("token_values") or {}).get("ref_log_prob") or []
    mask = [int(sampled) for _, length, sampled in runs for _ in range(length)]
    return PlainSequence(
        prompt=list(record["prompt_ids"]),
        response=[token for each, _, _ in runs for token in each["token_ids"]],
        mask=mask,
        engine_log_probs=[p for each, length, _ in runs for p in each.get("log_probs") or [0.0] * length],
        turns=[each["turn"] for each, length, _ in runs for _ in range(length)],
        kept_ids=[None for _ in mask],
        ref_log_probs=[value or 0.0 for value, flag in zip(recorded, mask) if flag],
        role=str(record.get("role", "")),
        step_rewards=[(int(turn), str(tool), float(value)) for turn, tool, value in record["rewards"]["steps"]],
        final_rewards={tool: float(value) for tool, value in record["rewards"]["final"].items()},
        score=record["rewards"].get("score"),
    )


# -- the comparison ------------------------------------------------------------------------------------------------------


def _compare(
    records: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    swayed: Sequence[float],
    figures: Mapping[str, float],
    logged: Mapping[str, Any],
    tolerance: float,
    decode: Callable[[Sequence[int]], str],
) -> Iterator[tuple[str, Term]]:
    """Yields (name, term) of each term of which the run recorded something."""
    recorded = _recorded_rows(records)
    tokens, longest = sum(map(len, rows)), max(map(len, rows), default=0)
    moved = torch.zeros(1)  # how far the log-prob of each token had moved when it was last trained on (T,)
    if figures.get("actor/optimizer_steps", 1) > 1:
        known = [row.known for row in rows if {"log_probs", "old_log_probs"} <= row.known.keys()]
        moved = torch.cat([moved, *((each["log_probs"] - each["old_log_probs"]).abs() for each in known)])
    largest, usual = float(moved.max()), float(moved.square().mean().sqrt())
    most_swayed = max(swayed, default=0.0)
    deepest = max(
        (float(row.known["old_log_probs"].abs().max()) for row in rows if "old_log_probs" in row.known), default=1.0
    )
    twice = list(_record_differences(records, decode))
    if any(values for _, values in recorded):
        masks = [*_mask_differences(recorded), *(gap for term, *gap in twice if term == "mask")]
        yield "mask", _worst("mask", tokens, masks)
    yield "text", _worst("text", len(records), [gap for term, *gap in twice if term == "text"])
    for name, sources in TERMS.items():
        smallest, gaps = _SMALL.get(name, 1.0), list[tuple[float, str]]()
        for source in sources:
            if source.startswith("token:"):
                slack = tolerance + (_TENSORS * largest if name in _UPDATED else 0.0)
                gaps += _token_differences(source.removeprefix("token:"), recorded, rows, swayed, slack)
                continue
            for figure in sorted(each for each in figures if each.startswith(source)):
                ours, theirs = figures[figure], logged.get(figure)
                if figure not in logged or figure.endswith("log_prob_diff_p99"):
                    continue
                place = f"{records[0]['step']}.jsonl" if figure.startswith(_SCORE) else METRICS_FILE
                if not isinstance(theirs, int | float):  # NaN is written as null
                    gaps.append((math.inf, f"{place}: {figure} {theirs}, plainly {ours:.8g}"))
                    continue
                slack = tolerance
                if figure.endswith("chi2_seq"):  # a square of a product over tokens
                    slack *= 2 * longest
                elif figure.endswith("_diff_max"):  # the rounding of the engine and of the trainer, where it is largest
                    slack *= 10
                if figure.startswith(_FOLLOWING) and name != "learning rate":
                    slack += _TENSORS * usual
                slack += most_swayed if figure in _OF_ADVANTAGES else 0.0
                size = max(abs(ours), smallest, deepest if figure.startswith("rollout_corr/") else 0.0)
                allowed = slack * size + (1.5 / tokens if figure.endswith(_CLIPPED) else 0.0)
                allowed += _ROUNDED if name == "weight change" else most_swayed if name == "advantage" else 0.0
                gaps.append((_share(theirs - ours, allowed), f"{place}: {figure} {theirs:.8g}, plainly {ours:.8g}"))
        if gaps:
            yield name, _worst(name, len(gaps), gaps)


@torch.no_grad()
def _sway(plain: PlainTrainer, error: float) -> list[float]:
    """How far each row's advantages move where the log-probs and values that they are made of are off by `error`: one that a
    small spread divides moves far. Leaves the rows with such advantages."""
    rows, charges = plain.rows, plain.algorithm["use_kl_in_reward"]
    if not (plain.has_critic or charges or plain.weighs_tokens):
        return [0.0] * len(rows)
    kl_coef, role_means, dice = plain.kl_coef, dict(plain.role_means), torch.Generator().manual_seed(0)
    known, tries = [(row.old, row.ref, row.values, row.norms) for row in rows], []
    for size in (0.0, error, error, error):
        plain.kl_coef, plain.role_means = kl_coef, dict(role_means)
        for row, given in zip(rows, known):
            signs = (torch.randint(0, 2, each.shape, generator=dice) * 2 - 1 for each in given)
            off = [each + size * sign * each.abs().clamp(min=1) for each, sign in zip(given, signs)]
            row.old, row.ref, row.values, row.norms = off
            row.rewards = torch.zeros(len(row), dtype=torch.float64)
            plain.place_rewards(row)
        if charges:
            plain.charge_kl(rows)
        (plain.gae_advantages if plain.has_critic else plain.story_advantages)(rows)
        tries.append([row.advantages for row in rows])
    return [max(float((other - own).abs().max()) for other in others) for own, *others in zip(*tries)]


def _recorded_rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """(place, token values, and the mask of its segments) of each sequence with a sampled token, in the plain trainer's
    order."""
    found = list[tuple[str, Mapping[str, Any]]]()
    for number, record in enumerate(records):
        *earlier, main = sequences_of(record)
        if not any(_sequence(main).mask):
            continue
        for index, each in enumerate((main, *earlier)):
            if any(mask := _sequence(each).mask):
                found.append((_place(number, record, index), {"mask": mask, **(each.get("token_values") or {})}))
    return found


def _place(number: int, record: Mapping[str, Any], sequence: int = 0) -> str:
    """The dump, the row in it, and which of the row's earlier sequences, from 1; 0: the main one."""
    return f"{record['step']}.jsonl: row {number}" + (f", earlier sequence {sequence - 1}" if sequence else "")


def _mask_differences(recorded: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[float, str]]:
    """Where the trainer trained on what was not sampled, or did not on what was."""
    for place, values in recorded:
        for token, (flag, value) in enumerate(zip(values["mask"], values.get("advantages", ()))):
            if flag and value is None:
                yield math.inf, f"{place}, token {token} was sampled and is not trained on"
            elif not flag and value is not None:
                yield math.inf, f"{place}, token {token} was not sampled and is trained on"


def _record_differences(
    records: Sequence[Mapping[str, Any]], decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, float, str]]:
    """(term, infinite, where) of what a dump's record says twice and not alike: its ids and mask, its texts."""
    for number, record in enumerate(records):
        *earlier, main = sequences_of(record)
        for index, each in enumerate((main, *earlier)):
            place, plain = _place(number, record, index), _sequence(each)
            for name, ours in (("response_mask", plain.mask), ("response_ids", plain.response)):
                if each[name] != ours:
                    yield "mask", math.inf, f"{place}: {name} is not what its segments say"
            texts = {"input": (each, "input", plain.prompt), "output": (each, "output", plain.response)}
            texts |= {f"segment {n}": (part, "text", part["token_ids"]) for n, part in enumerate(each["segments"])}
            for name, (holder, key, ids) in texts.items():
                if holder.get(key) != (said := decode(ids)):
                    yield "text", math.inf, f"{place}: {name} {holder.get(key)!r:.80}, its tokens {said!r:.80}"


def _token_differences(
    column: str,
    recorded: Sequence[tuple[str, Mapping[str, Any]]],
    rows: Sequence[Row],
    swayed: Sequence[float],
    tolerance: float,
) -> Iterator[tuple[float, str]]:
    """(difference in units of what is allowed, where) of each sampled token whose value the dump has."""
    for (place, values), row, sway in zip(recorded, rows, swayed, strict=True):
        if column not in values or column not in row.known:
            continue
        sampled = [(n, value) for n, (value, flag) in enumerate(zip(values[column], values["mask"])) if flag]
        if len(sampled) != len(row.known[column]):
            continue  # a correction took tokens out
        trained = values.get("advantages") or []
        for (token, theirs), ours in zip(sampled, row.known[column].tolist()):
            if theirs is None and token < len(trained) and trained[token] is not None:  # NaN is written as null
                yield math.inf, f"{place}, token {token}: no number, plainly {ours:.6g}"
            elif theirs is not None:
                allowed = tolerance * max(abs(ours), 1.0) + (sway if column == "advantages" else 0.0)
                yield _share(theirs - ours, allowed), f"{place}, token {token}: {theirs:.6g}, plainly {ours:.6g}"


def _compare_weights(plain: PlainTrainer, before: Path, after: Path, dtype: str) -> Term:
    """How far each role's weights moved in the run and plainly, and how far apart."""
    gaps = list[tuple[float, str]]()
    for role, (model, _) in plain.roles().items():
        start_of, theirs = (read_state(folder / role / STATE, "model.") for folder in (before, after))
        apart = moved = size = 0.0
        for name, weight in model.named_parameters():
            start = start_of[f"model.{name}"].double()
            change = weight.detach().cpu() - start.to(getattr(torch, dtype)).double()
            apart += float((theirs[f"model.{name}"].double() - start - change).square().sum())
            moved += float(change.square().sum())
            size += float(start.square().sum())
        allowed = max(_TENSORS, TOLERANCES[dtype]) * math.sqrt(moved) + _ROUNDED * math.sqrt(size)
        gap = f"{role}: {math.sqrt(apart):.3g} from the plain change of {math.sqrt(moved):.3g}"
        gaps.append((_share(math.sqrt(apart), allowed), gap))
    return _worst("weight change", len(plain.named_weights()), gaps)


def _written_weights(checkpoint: Path, dtype: str) -> Iterator[tuple[float, str]]:
    """Whether the model that others read from a checkpoint has the weights that a resumed run goes on from."""
    state = read_state(checkpoint / "actor" / STATE, "model.")
    for name, weight in load_policy(checkpoint / "actor" / MODEL).to(getattr(torch, dtype)).named_parameters():
        equal = torch.equal(weight, state[f"model.{name}"].to(weight.dtype))
        yield 0.0 if equal else math.inf, f"{checkpoint.name}/actor/{MODEL} has another {name} than its {STATE}"


def _share(difference: float, allowed: float) -> float:
    """|difference| in units of what is allowed; infinite if it is no number."""
    if not math.isfinite(difference):
        return math.inf
    return abs(difference) / allowed if allowed else (math.inf if difference else 0.0)


def _worst(name: str, compared: int, gaps: Any) -> Term:
    excess, where = max(gaps, default=(0.0, ""), key=lambda gap: gap[0])
    return Term(name, compared, excess, where)
