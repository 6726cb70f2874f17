"""Advantages as the papers write them, one rollout after another, in plain Python numbers.

A `Story` is a rollout: the sampled tokens of its sequences in time order, and nothing else. Each estimator takes the stories
of a batch and returns, of each, the advantages and the returns of its tokens.

    GRPO      arXiv 2402.03300  section 4.1     RLOO      arXiv 2402.14740  eq. 9       OPO    arXiv 2505.23585
    Dr. GRPO  arXiv 2503.20783                  REINFORCE++  arXiv 2501.03262           GPG    arXiv 2504.02546
    Pass@k    arXiv 2503.19595                  ReMax     arXiv 2310.10505              GDPO   arXiv 2601.05242
    GiGPO     arXiv 2505.10978  eqs. 3 to 8     turn-level credit  arXiv 2505.11821     MaxRL  Tajwar et al. 2026
    RAE       arXiv 2506.24119 (SPIRAL)
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Story:
    """`turns` and `seen` are of each token: which turn it belongs to, and what that turn answered. `norms` are 1 − 2π + Σπ²;
    `baseline` is the reward of the greedy answer, or what the role earned on average before; `components` are rewards by
    name."""

    uid: str
    rewards: list[float]
    turns: list[Hashable]
    seen: list[Hashable]
    norms: list[float] = field(default_factory=list)
    baseline: float = 0.0
    components: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return math.fsum(self.rewards)

    @property
    def length(self) -> int:
        return len(self.rewards)


Result = tuple[list[list[float]], list[list[float]]]


def advantages(stories: list[Story], options: dict[str, Any]) -> Result:
    """Those of `options["adv_estimator"]`; `options` is the section `algorithm`."""
    return ESTIMATORS[options["adv_estimator"]](stories, options)


# -- what is compared ----------------------------------------------------------------------------------------------------


def are_equal(scores):
    """Whether scores differ by rounding alone."""
    return max(scores) - min(scores) <= max(1e-6, *(1e-8 * abs(score) for score in scores))


def in_groups(keys, scores, judge, alone="zero"):
    """judge(the scores of a group, the numbers of its members) in every group of two or more whose scores differ."""
    groups = defaultdict(list)
    for number, key in enumerate(keys):
        groups[key].append(number)
    found = [0.0] * len(scores)
    for members in groups.values():
        group = [scores[m] for m in members]
        if len(members) == 1 and alone == "raw":
            found[members[0]] = group[0]
        elif len(members) > 1 and not are_equal(group):
            for member, value in zip(members, judge(group, members)):
                found[member] = value
    return found


def normalised(options):
    """(r − mean) / (std + ε), or r − mean."""

    def judge(group, _):
        mean = statistics.fmean(group)
        spread = statistics.stdev(group) + 1e-6 if options["norm_adv_by_std_in_grpo"] else 1.0
        return [(score - mean) / spread for score in group]

    return judge


def centred(group, _):
    mean = statistics.fmean(group)
    return [score - mean for score in group]


def of_outcomes(stories, options, judge):
    """One number a story, on each of its tokens."""
    scores = [story.total for story in stories]
    return in_groups([story.uid for story in stories], scores, judge, options["singleton_advantage"])


def on_tokens(stories, numbers):
    found = [[number] * story.length for story, number in zip(stories, numbers)]
    return found, found


def whiten(values, counts):
    """Mean 0 and variance 1 over the tokens of the stories that count."""
    every = [value for row, counted in zip(values, counts) if counted for value in row]
    if not every or are_equal(every):
        return [[0.0] * len(row) for row in values]
    mean = statistics.fmean(every)
    scale = math.sqrt(math.fsum((value - mean) ** 2 for value in every) / max(len(every) - 1, 1) + 1e-8)
    return [[(value - mean) / scale if counted else 0.0 for value in row] for row, counted in zip(values, counts)]


def compared(stories, options):
    """Which stories have another of their prompt beside them, or count without."""
    uids = [story.uid for story in stories]
    return [options["singleton_advantage"] == "raw" or uids.count(uid) > 1 for uid in uids]


def returns_of(rewards, gamma):
    """G_t = r_t + γ G_{t+1}."""
    found, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        found.append(following)
    return found[::-1]


# -- outcomes ------------------------------------------------------------------------------------------------------------


def grpo(stories, options):
    return on_tokens(stories, of_outcomes(stories, options, normalised(options)))


def pass_at_k(stories, options):
    def judge(group, _):
        second, best = sorted(group)[-2:]
        spread = statistics.stdev(group) + 1e-6 if options["norm_adv_by_std_in_grpo"] else 1.0
        winner = group.index(best)
        return [(best - second) / spread * (number == winner) for number in range(len(group))]

    return on_tokens(stories, of_outcomes(stories, options, judge))


def rloo(stories, options):
    def judge(group, _):
        return [score - (sum(group) - score) / (len(group) - 1) for score in group]

    return on_tokens(stories, of_outcomes(stories, options, judge))


def opo(stories, options):
    def judge(group, members):
        lengths = [stories[member].length for member in members]
        baseline = sum(length * score for length, score in zip(lengths, group)) / sum(lengths)
        return [score - baseline for score in group]

    return on_tokens(stories, of_outcomes(stories, options, judge))


def gpg(stories, options):
    numbers = of_outcomes(stories, options, centred)
    teaching = {story.uid for story, number in zip(stories, numbers) if abs(number) > 1e-6}
    batch, of_them = len(stories), sum(story.uid in teaching for story in stories)
    alpha = batch / max(of_them, 1) / options["adv_estimator_kwargs"].get("f_norm", 1.0)
    return on_tokens(stories, [alpha * number for number in numbers])


def max_rl(stories, options):
    def judge(group, _):
        mean = statistics.fmean(group)
        return [(score - mean) / mean if mean > 1e-6 else 0.0 for score in group]

    return on_tokens(stories, of_outcomes(stories, options, judge))


def reinforce_baseline(stories, options):
    values, _ = on_tokens(stories, of_outcomes(stories, options, centred))
    white = whiten(values, compared(stories, options))
    return white, white


def gdpo(stories, options):
    sums = [0.0] * len(stories)
    keys, uids = options["gdpo_reward_keys"], [story.uid for story in stories]
    for key, weight in zip(keys, options["gdpo_reward_weights"] or [1.0] * len(keys)):
        scores = [story.components[key] for story in stories]
        parts = in_groups(uids, scores, normalised(options), options["singleton_advantage"])
        sums = [total + weight * part for total, part in zip(sums, parts)]
    white = whiten(on_tokens(stories, sums)[0], compared(stories, options))
    return white, white


def rae(stories, options):
    """R − b, b as `running_means` has it."""
    return on_tokens(stories, [story.total - story.baseline for story in stories])


def running_means(keys, stories, means, decay):
    """b ← α b + (1 − α) R, from 0: each story's baseline is what it finds, and `means` are as it leaves them."""
    for key, story in zip(keys, stories):
        story.baseline = means.get(key, 0.0)
        means[key] = decay * story.baseline + (1 - decay) * story.total


# -- returns -------------------------------------------------------------------------------------------------------------


def reinforce_plus_plus(stories, options):
    returns = [returns_of(story.rewards, options["gamma"]) for story in stories]
    return whiten(returns, [True] * len(stories)), returns


def remax(stories, options):
    returns = [returns_of(story.rewards, 1.0) for story in stories]
    return [[g - story.baseline for g in row] for story, row in zip(stories, returns)], returns


def optimal_token_baseline(stories, options):
    """B_t = Σ W_t G_t / Σ W_t, W_t = Σ_{j ≤ t} ‖s_j‖², over the answers that have a t-th token."""
    returns = [returns_of(story.rewards, 1.0) for story in stories]
    found = []
    for story, own in zip(stories, returns):
        group = [number for number, other in enumerate(stories) if other.uid == story.uid]
        every = [g for number in group for g in returns[number]]
        row = []
        for t, g in enumerate(own):
            there = [number for number in group if t < stories[number].length]
            weights = [sum(stories[number].norms[: t + 1]) + 1e-8 for number in there]
            baseline = sum(w * returns[number][t] for w, number in zip(weights, there)) / sum(weights)
            if len(there) == 1 and options["adv_estimator_kwargs"].get("handle_zero_tail", True):
                baseline = 0.0
            row.append(g - baseline)
        if len(group) == 1:
            row = list(own) if options["singleton_advantage"] == "raw" else [0.0] * story.length
        elif are_equal(every):
            row = [0.0] * story.length
        found.append(row)
    return found, returns


def gae(rewards, values, turns, options):
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t (arXiv 1506.02438, eq. 16); by turns, γ = λ = 1 within one."""
    found, following_value, following_advantage = [], 0.0, 0.0
    for t in range(len(values) - 1, -1, -1):
        gamma, lam = options["gamma"], options["lam"]
        if options["gae_timestep_unit"] == "turn" and turns[t : t + 2] == [turns[t]] * 2:
            gamma = lam = 1.0
        delta = rewards[t] + gamma * following_value - values[t]
        following_advantage = delta + gamma * lam * following_advantage
        following_value = values[t]
        found.append(following_advantage)
    return found[::-1]


# -- turns ---------------------------------------------------------------------------------------------------------------


def by_turns(place):
    """GRPO of rollouts + ω · GRPO of turns that stood in the same place: `place(story, number of the turn, token)`."""

    def estimate(stories, options):
        whole = of_outcomes(stories, options, normalised(options))
        keys, returns, turns_of = [], [], []
        for story in stories:
            turns = list(dict.fromkeys(story.turns))
            paid = [math.fsum(r for r, t in zip(story.rewards, story.turns) if t == turn) for turn in turns]
            returns += returns_of(paid, options["gamma"])
            keys += [(story.uid, place(story, n, story.turns.index(turn))) for n, turn in enumerate(turns)]
            turns_of.append(turns)
        steps = iter(in_groups(keys, returns, normalised(options)))
        weight = options["adv_estimator_kwargs"].get("step_advantage_w", 1.0)
        found = []
        for story, number, turns in zip(stories, whole, turns_of):
            step = {turn: next(steps) for turn in turns}
            found.append([number + weight * step[turn] for turn in story.turns])
        return found, found

    return estimate


ESTIMATORS = {
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "hierarchical_grpo": grpo,  # what is compared is the trainer's to say
    "grpo_passk": pass_at_k,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "opo": opo,
    "gpg": gpg,
    "max_rl": max_rl,
    "rae": rae,
    "reinforce_plus_plus_baseline": reinforce_baseline,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": optimal_token_baseline,
    "turn_grpo": by_turns(lambda story, number, token: number),
    "gigpo": by_turns(lambda story, number, token: story.seen[token]),
}
