"""What a step of the plain trainer is given, and what is reported of it before anything is learned."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch

from etude.plain.advantages import are_equal


@dataclass
class Sequence:
    """One context: the prompt, and what followed it, token by token.

    `mask` is 1 for the tokens that the policy sampled; `engine_log_probs` are the engine's for those; `turns` counts the
    assistant's turns; `kept_ids` are what a token was drawn from, where that is not the whole vocabulary."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    engine_log_probs: list[float]
    turns: list[int]
    kept_ids: list[list[int] | None]
    heads: list[tuple[list[int], list[float]] | None] = field(default_factory=list)  # see `correction.centre`
    ref_log_probs: list[float] = field(default_factory=list)  # of the sampled tokens, where the reference is not there
    role: str = ""  # of the agent, or NAME/NUMBER
    step_rewards: list[tuple[int, str, float]] = field(default_factory=list)  # of an earlier one: its role's own
    final_rewards: dict[str, float] = field(default_factory=dict)
    score: float | None = None

    @property
    def sampled(self) -> list[int]:
        """Places of the sampled tokens in the whole context."""
        return [len(self.prompt) + place for place, flag in enumerate(self.mask) if flag]

    @property
    def sampled_turns(self) -> set[int]:
        """The numbers of its turns."""
        return {turn for turn, flag in zip(self.turns, self.mask) if flag}

    @property
    def answered(self) -> list[tuple[int, ...]]:
        """For each sampled token, what its turn answered: all since the last sampled token before the turn."""
        found: list[tuple[int, ...]] = []
        answer: tuple[int, ...] = ()
        shown, turn = list(self.prompt), None
        for token, flag, its_turn in zip(self.response, self.mask, self.turns):
            if not flag:
                shown.append(token)
                continue
            if its_turn != turn:
                turn, answer = its_turn, tuple(shown)
            shown = []
            found.append(answer)
        return found


@dataclass
class Rollout:
    """One answer to the prompt `uid`. The last of its sequences, in time order, is the main one; none: it was dropped."""

    uid: str
    sequences: list[Sequence] = field(default_factory=list)
    step_rewards: list[tuple[int, str, float]] = field(default_factory=list)  # (turn, tool, value)
    final_rewards: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    accuracy: float | None = None  # as the scorer reports it
    num_turns: int = 0
    stop_reason: str = ""
    failures: int = 0  # of infrastructure
    attempts_allowed: int = 2
    environment: str = ""
    reported: dict[str, float] = field(default_factory=dict)  # by the environment's steps
    baseline: Rollout | None = None  # the greedy answer to the same prompt
    source: str = ""  # the row's data source

    @property
    def main(self) -> Sequence:
        """The sequence that lengths, rewards and turns are those of."""
        return self.sequences[-1]

    @property
    def rewards_by_role(self) -> bool:
        """Whether roles have rewards of their own."""
        return any(s.step_rewards or s.final_rewards or s.score is not None for s in self.sequences[:-1])

    def paid(self, role):
        """What has the rewards of a role: the rollout that of the main sequence, the last sequence those of another."""
        return self if role == self.main.role else self.of_role(role)[-1]

    def home(self, role, turn):
        """The sequence of a role that has the turn; the last one if none has."""
        peers = self.of_role(role)
        return next((each for each in [peers[-1], *peers] if turn in each.sampled_turns), peers[-1])

    def of_role(self, role):
        """The sequences of a role with sampled tokens."""
        return [each for each in self.sequences if each.role == role and each.sampled]

    def ends_role(self, sequence) -> bool:
        """Whether it is the last of a role that is not the main sequence's."""
        return sequence is self.of_role(sequence.role)[-1] and sequence.role != self.main.role


NO_FAULTS = (
    "rollout/prompt_too_long",
    "rollout/unread_calls",
    "rollout/unwritable_answers",
    "rollout/context_refused",
    "rollout/release_failures",
    "rollout/agent_errors",
)


def spread(name, values):
    """mean, max and min; nothing of nothing."""
    values = [float(value) for value in values]
    if not values:
        return {}
    return {f"{name}/mean": float(np.mean(values)), f"{name}/max": max(values), f"{name}/min": min(values)}


def total_reward(rollout, weights):
    """Of a rollout or a sequence: w_tool · (Σ step rewards + Σ final rewards) + w_score · score."""
    tools = sum(value for _, _, value in rollout.step_rewards) + sum(rollout.final_rewards.values())
    return weights["tool_reward_weight"] * tools + weights["score_weight"] * (rollout.score or 0.0)


def role_total(rollout, role, weights):
    """What a role earned: the main sequence's is the rollout's reward, and so is every other's where none has its own."""
    if role == rollout.main.role or not rollout.rewards_by_role:
        return total_reward(rollout, weights)
    return sum(total_reward(each, weights) for each in rollout.sequences[:-1] if each.role == role)


def role_figures(rows, weights, means):
    """Of each role's name: scores, advantages of its tokens, and the running mean of its rewards, if there is one."""
    figures, names = {}, {row.sequence.role.partition("/")[0] for row in rows}
    for name in names if any(row.sequence.role for row in rows) else ():
        own = [row for row in rows if row.sequence.role.partition("/")[0] == name]
        parts = {(id(row.rollout), row.sequence.role): row for row in own}.values()
        earned = [role_total(row.rollout, row.sequence.role, weights) for row in parts]
        figures[f"role/{name or 'none'}/score/mean"] = float(np.mean(earned))
        figures[f"role/{name or 'none'}/advantages/mean"] = float(torch.cat([row.advantages for row in own]).mean())
        if known := [mean for key, mean in means.items() if key.endswith(f"/{name}")]:
            figures[f"role/{name or 'none'}/baseline"] = float(np.mean(known))
    return figures


def rollout_figures(asked, config):
    """What came of the rollouts, before anything is learned from them."""
    weights = config["reward_model"]
    there = [r for r in asked if r.sequences]
    gone = [r for r in asked if not r.sequences]
    figures = environment_figures(there, config) | {
        "rollout/infrastructure_failures": sum(r.failures for r in asked),
        "rollout/dropped": len(gone),
        "rollout/given_up": sum(r.failures < r.attempts_allowed for r in gone),
        "rollout/nothing_sampled": sum(not r.main.sampled for r in there),
        **dict.fromkeys(NO_FAULTS, 0),
    }
    if not there:
        return figures
    sources = {
        "step": [sum(value for _, _, value in r.step_rewards) for r in there],
        "final": [sum(r.final_rewards.values()) for r in there],
        "score": [r.score for r in there if r.score is not None],
        "total": [total_reward(r, weights) for r in there],
        "success": [(total_reward(r, weights) if r.accuracy is None else r.accuracy) >= 1 for r in there],
    }
    figures |= {f"reward/{name}/mean": float(np.mean(values)) for name, values in sources.items() if values}
    figures["rollout/sequences/mean"] = float(np.mean([len(r.sequences) for r in there]))
    figures |= spread("num_turns", [r.num_turns for r in there])
    figures |= spread("tool_call_counts", [0 for _ in there])
    figures |= dict.fromkeys(("rollout/tool_use_rate", "rollout/malformed_calls"), 0)
    figures |= dict.fromkeys(("rollout/calls_not_executed", "rollout/unknown_tool_calls"), 0)
    for reason in {r.stop_reason for r in there}:
        figures[f"rollout/stop_reason/{reason}"] = float(np.mean([r.stop_reason == reason for r in there]))
    given = defaultdict(list)
    for r in there:
        tools = defaultdict(float, r.final_rewards)
        for _, tool, value in r.step_rewards:
            tools[tool] += value
        for tool, value in tools.items():
            given[tool].append(value)
    return figures | {f"tool/{tool}/reward": float(np.mean(values)) for tool, values in given.items()}


def environment_figures(there, config):
    """What came of each environment's episodes."""
    weights, figures = config["reward_model"], {}
    for name in {r.environment for r in there} - {""}:
        own = [r for r in there if r.environment == name]
        totals = [total_reward(r, weights) for r in own]
        won = [(total if r.accuracy is None else r.accuracy) >= 1 for r, total in zip(own, totals)]
        figures |= {
            f"env/{name}/episodes": len(own),
            f"env/{name}/reward/mean": sum(totals) / len(own),
            f"env/{name}/success/mean": sum(won) / len(own),
            f"env/{name}/num_turns/mean": sum(r.num_turns for r in own) / len(own),
        }
        for key in {key for r in own for key in r.reported}:
            values = [r.reported[key] for r in own if key in r.reported]
            figures[f"env/{name}/metrics/{key}"] = sum(values) / len(values)
    return figures


def filter_prompts(rows, asked, config):
    """(rows without those of prompts whose answers all measure the same, and of never more prompts than a batch has;
    figures)."""
    algorithm, wanted = config["algorithm"], config["data"]["train_batch_size"]
    kind, options = algorithm["zero_variance"], algorithm["filter_groups"]
    if kind == "keep" or (kind is None and not options["enable"]):
        return rows, {}
    measure = {
        "reward": lambda rollout: total_reward(rollout, config["reward_model"]),
        "score": lambda rollout: rollout.score,
    }[options["metric"] or "reward"]
    measured, seen = defaultdict(lambda: defaultdict(list)), set()
    for row in rows:
        role = "" if options["metric"] == "score" else row.sequence.role
        if (id(row.rollout), role) not in seen and (role or row.is_main or options["metric"] != "score"):
            seen.add((id(row.rollout), role))
            total = role_total(row.rollout, role, config["reward_model"]) if role else measure(row.rollout)
            measured[row.rollout.uid][role.partition("/")[0]].append(total)
    spread = [uid for uid, given in measured.items() if not all(map(are_equal, given.values()))]
    figures = {
        "num_gen_batches": 1 + max(int(r.uid.split("-")[0].split(".")[1]) for r in asked),
        "evicted_samples": len(measured) - len(spread),
        "discarded_surplus_samples": max(len(spread) - wanted, 0),
        "missing_samples": max(wanted - len(spread), 0),
    }
    kept = [row for row in rows if row.rollout.uid in spread[:wanted]]
    return kept, {f"training/filter_groups/{name}": value for name, value in figures.items()}
