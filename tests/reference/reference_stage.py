"""The stage of the plain trainer: a model of a few thousand weights, an agent loop whose rollouts are as ragged as they can
be, and the real trainer's run on both.

The loop draws every token from the engine, and everything else (runs, holes in the mask, sequences, rewards, failures) from
a seed. It keeps what it returned: the plain trainer is given those, not what became of them.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from etude.agents import AgentLoopBase, register
from etude.agents.roles import carriers
from etude.algorithms.losses import POLICY_LOSSES
from etude.config import compose
from etude.data.files import write_parquet
from etude.errors import InfrastructureError, TrainingStopped
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, loading, save_pretrained
from etude.options.validate import plain
from etude.plain.rollouts import Rollout, Sequence
from etude.trainer.run import train
from etude.trajectory import Head, Provenance, Trajectory
from etude.workers.checkpoint import read_state

WIDTH = 20  # data.max_response_length
VOCABULARY = 265


@dataclass(frozen=True)
class Shape:
    """How ragged rollouts are; shares are probabilities."""

    seed: int = 0
    sequences: int = 1  # at most, in a rollout
    holes: float = 0.0  # share of sampled runs that the agent masks out
    silent: float = 0.0  # share of rollouts without a sampled token
    broken: float = 0.0  # share of groups in which infrastructure breaks a rollout for good
    levels: tuple[float, ...] = (0.0, 0.25, 1.25)  # what a score can be
    tool_rewards: bool = False
    roles: tuple[str, ...] = ()  # which sequences have, some with rewards of their own


@dataclass
class Ledger:
    """What the loop was asked for and returned, by (uid, rollout_index)."""

    shape: Shape = Shape()
    asked: dict[tuple[str, int], Rollout] = field(default_factory=dict)
    returned: dict[tuple[str, int], list[Trajectory]] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)  # of sampled tokens, as often as the policy loss saw them


LEDGER = Ledger()


@POLICY_LOSSES.register("reference_recorded")
def recorded(**given):
    """The vanilla loss, which leaves in the ledger what advantages it was given."""
    LEDGER.advantages += given["advantages"][given["response_mask"] > 0].tolist()
    return POLICY_LOSSES.get("vanilla")(**given)


@register("reference_ragged")
class Ragged(AgentLoopBase):
    """Rolls out what `LEDGER.shape` and the row's name say."""

    async def run(self, sampling_params, **row):
        shape, key = LEDGER.shape, (row["uid"], row["rollout_index"])
        self.dice = random.Random(f"{shape.seed}/{key}")
        asked = LEDGER.asked.setdefault(key, Rollout(row["uid"]))
        group = random.Random(f"{shape.seed}/{row['uid']}")
        n = self.context.options.n
        if group.random() < shape.broken and row["rollout_index"] % n == group.randrange(n):
            asked.failures += 1
            raise InfrastructureError("the stage breaks this one")
        count = self.dice.randint(1, shape.sequences)
        sequences = []
        for number in range(count):
            last = number == count - 1
            prompt = self.chat.initial_ids(row["raw_prompt"]) if last else self.words(self.dice.randint(1, 12))
            made = Trajectory(row["request_id"], prompt)
            await self.talk(made, sampling_params, silent=last and self.dice.random() < shape.silent)
            sequences.append(made)
        if shape.tool_rewards and group.random() < 0.7:
            self.reward(sequences[-1])
        if shape.roles:
            self.assign_roles(sequences)
        LEDGER.returned[key] = sequences
        return [sequence.to_output() for sequence in sequences]

    async def talk(self, made, sampling_params, silent):
        """Runs of sampled tokens and of others, until the dice or the room say no."""
        for turn in range(self.dice.randint(1, 4)):
            if (turn or self.dice.random() < 0.2) and self.room(made) > 1:
                words = self.words(self.dice.randint(1, min(3, self.room(made) - 1)))
                made.append(words, self.dice.choice([Provenance.TOOL, Provenance.TEMPLATE, Provenance.USER]))
                made.user_turns += 1
            if silent or not self.room(made):
                continue
            params = dict(sampling_params, max_tokens=min(self.dice.randint(1, 8), self.room(made)))
            drawn = await self.server_manager.generate(prompt_ids=made.context_ids(), sampling_params=params)
            hidden = self.dice.random() < LEDGER.shape.holes
            kind = Provenance.TOOL if hidden else Provenance.SAMPLED
            made.append(drawn.token_ids, kind, log_probs=None if hidden else drawn.log_probs)
            made.assistant_turns += 1

    def assign_roles(self, sequences):
        """In half of the rollouts every role has a reward of its own."""
        for sequence in sequences:
            sequence.role = self.dice.choice(LEDGER.shape.roles)
        if self.dice.random() < 0.5:
            for role, sequence in carriers(sequences).items():
                if role != sequences[-1].role:
                    sequence.rewards.score = self.dice.choice([0.0, 0.5, 2.0])
                    sequence.rewards.steps.append((0, "hammer", self.dice.choice([0.0, -1.0])))

    def words(self, count):
        return [self.dice.randrange(VOCABULARY) for _ in range(count)]

    def reward(self, made):
        """One total in several ways: in tenths a turn, or at the end."""
        total = self.dice.choice([0.0, 1.1, 3.3])
        for turn in range(made.assistant_turns):
            if self.dice.random() < 0.5:
                made.rewards.steps.append((turn, "hammer", total / 3))
        if self.dice.random() < 0.5:
            made.rewards.final["saw"] = -total


SCORES = '''
"""Scores that come from a few levels, so that some groups have spread and some have none."""

import zlib

from reference_stage import LEDGER


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    levels = LEDGER.shape.levels
    return levels[zlib.crc32(solution_str.encode()) % len(levels)] + bonus


def other_score(data_source, solution_str, ground_truth, extra_info=None):
    return 7.0
'''


def build(folder):
    """Writes models, rows and the scorer into `folder`. As critics, `policy` and `other` have a trained head: with one of
    zeros, where nothing was earned either, there is no gradient but rounding, which Adam makes as large as any."""
    tokenizer = build_tiny_tokenizer([], VOCABULARY)
    tokenizer.chat_template = "{% if loud is defined %}! {% endif %}" + tokenizer.chat_template
    for name, seed in (("policy", 1), ("other", 2), ("headless", 3)):
        spec = TinyModelSpec(
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            intermediate_size=24,
            vocab_size=VOCABULARY,
            max_position_embeddings=256,
            seed=seed,
            initializer_range=0.3,
        )
        save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder / name)
        if name != "headless":
            head = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)) / 4
            save_file({"weight": head, "bias": torch.tensor([0.1])}, folder / name / "value_head.safetensors")
    (folder / "scores.py").write_text(SCORES)
    (folder / "sevens.py").write_text("def compute_score(**given):\n    return 7.0\n")
    rows = [
        {
            "data_source": "stage",
            "prompt": [{"role": "user", "content": f"{i} is" + " so" * (i % 4)}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(24)
    ]
    write_parquet(rows, folder / "rows.parquet")
    return folder


def arguments(folder, run, *overrides):
    """What every run of the stage has; `overrides` come last."""
    return [
        f"data.train_files={folder}/rows.parquet",
        "data.train_batch_size=3",
        "data.max_prompt_length=96",
        f"data.max_response_length={WIDTH}",
        f"actor_rollout_ref.model.path={folder}/policy",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.weight_probe=false",
        "actor_rollout_ref.rollout.agent.default_agent_loop=reference_ragged",
        f"custom_reward_function.path={folder}/scores.py",
        f"trainer.default_local_dir={run}",
        "trainer.min_valid_fraction=0",
        "trainer.total_training_steps=1",
        "trainer.logger=[jsonl]",
        "trainer.report=false",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        *overrides,
    ]


@dataclass
class Outcome:
    """What a run of the real trainer was given and left: its resolved configuration; rollouts and figures a step; the
    advantages that its policy loss saw; the last weights by role; whether it gave up before its last step was due."""

    config: dict
    rollouts: list[list[Rollout]]
    figures: list[dict[str, float]]
    advantages: list[float]
    weights: dict[str, dict]
    stopped: bool


@contextmanager
def in_float64() -> Iterator[None]:
    """The real trainer computes in float64 where it is asked for float32, and so do Transformers' norms, which otherwise
    take float32 whatever they are given."""

    def norm(self, hidden):
        return rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    with mock.patch.dict(loading.DTYPES, float32="float64"), mock.patch.object(Qwen3RMSNorm, "forward", norm):
        yield


def run_product(folder, run, shape, overrides):
    """A run of the real trainer, from a configuration to files."""
    LEDGER.__init__(shape)
    declared = ["actor_rollout_ref.rollout.agent.roles=[white,black]"] if shape.roles else []
    config = compose("ppo_trainer", arguments(folder, run, *declared, *overrides))
    stopped = True
    with suppress(TrainingStopped):
        train(config)
        stopped = False
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [each["step"] for each in figures if each["step"]]
    last = run / f"global_step_{steps[-1]}"
    weights = {part.name: load_weights(part) for part in last.iterdir() if part.is_dir()}
    resolved = plain(config)
    return Outcome(
        resolved, [rollouts_of(step, resolved) for step in steps], figures, LEDGER.advantages, weights, stopped
    )


def rollouts_of(step, config):
    """All rollouts that a step asked for, in the batch's order, those of refills behind; an empty one where none came."""
    size, n = config["data"]["train_batch_size"], config["actor_rollout_ref"]["rollout"]["n"]
    allowed = config["actor_rollout_ref"]["rollout"]["infrastructure_retries"] + 1
    found = []
    for attempt in range(1 + max(int(uid.split("-")[0].split(".")[1]) for uid in uids_of(step))):
        for number in range(size * n):
            greedy = size * n + number // n
            found.append(find_rollout(f"{step}.{attempt}-{number // n}", number, allowed))
            found[-1].baseline = find_rollout(f"{step}.{attempt}-greedy-{greedy}", greedy, allowed)
    return found


def find_rollout(uid, index, attempts_allowed):
    """What the loop was asked for, with what it returned; an empty one where it was never asked."""
    rollout = LEDGER.asked.get((uid, index), Rollout(uid))
    rollout.attempts_allowed = attempts_allowed
    if not rollout.sequences:
        fill(rollout, LEDGER.returned.get((uid, index), []))
    return rollout


def uids_of(step):
    return [uid for uid, _ in LEDGER.asked if uid.startswith(f"{step}.")]


def fill(rollout, sequences):
    """Puts into `rollout` what the loop returned."""
    for sequence in sequences:
        runs = sequence.segments
        kept_ids = [kept for run in runs for kept in run.kept_ids or [None] * len(run.token_ids)]
        heads = [each if isinstance(each, Head) else None for each in kept_ids]
        rollout.sequences.append(
            Sequence(
                prompt=list(sequence.prompt_ids),
                response=[token for run in runs for token in run.token_ids],
                mask=[int(run.provenance is Provenance.SAMPLED) for run in runs for _ in run.token_ids],
                engine_log_probs=[p for run in runs for p in run.log_probs or [0.0] * len(run.token_ids)],
                turns=[run.turn for run in runs for _ in run.token_ids],
                kept_ids=[each.kept if isinstance(each, Head) else each for each in kept_ids],
                heads=[head and (list(head.ids), list(head.log_probs)) for head in heads],
                role=sequence.role,
                step_rewards=sequence.rewards.steps,
                final_rewards=sequence.rewards.final,
                score=sequence.rewards.score,
            )
        )
    if sequences:
        main = sequences[-1]
        rollout.step_rewards, rollout.final_rewards = main.rewards.steps, main.rewards.final
        rollout.score, rollout.accuracy = main.rewards.score, main.rewards.score_info.get("acc")
        rollout.stop_reason = main.stop_reason.value
        environment = main.extra_fields.get("environment") or {"name": "", "metrics": {}}
        rollout.environment, rollout.reported = environment["name"], environment["metrics"]
        answering = sequences[-1:] if main.first_turn else sequences
        rollout.num_turns = 1 + sum(each.assistant_turns - each.first_turn for each in sequences)
        rollout.num_turns += sum(each.user_turns for each in answering)
        rollout.source = "stage"


def load_weights(part):
    """The tensors of a role's model, those of a value head beside it included; a head alone has no model."""
    folder = part / "huggingface"
    if not folder.is_dir():
        return {name.removeprefix("model."): tensor for name, tensor in read_state(part / "state", "model.").items()}
    head = folder / "value_head.safetensors"
    tensors = load_file(folder / "model.safetensors")
    return tensors | ({f"head.{name}": t for name, t in load_file(head).items()} if head.is_file() else {})
