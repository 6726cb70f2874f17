"""Estimators for evaluations and for validation during training: avg@n, pass@k (best of k) and maj@k, with confidence
intervals.

Invariant: pure functions of scores grouped by prompt. Estimates over k of n samples are exact expectations over all subsets,
hence unbiased; intervals count prompts, since samples of one prompt are not independent. A missing sample (None) is counted
as missing and otherwise ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution
_RESAMPLES = 1000
_MAX_FLOAT_SAMPLES = 1000  # C(1000, 500) is about 1e299


@dataclass(frozen=True)
class Sample:
    """One scored sample. `score` is its total reward, `answer` the answer that the scorer extracted (None: it found none);
    `answers`: whether the scorer extracts answers at all."""

    score: float
    success: float
    tool_use: float
    answer: str | None = None
    answers: bool = False


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson 1927); (0, 1) for n = 0. `successes` may be fractional.

    Raises:
        ValueError: `successes` is not between 0 and `n`.
    """
    if n == 0 and successes == 0:
        return 0.0, 1.0
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    p, z2 = successes / n, _Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else max(centre - half, 0.0)  # the closed form has rounding errors at 0 and n
    high = 1.0 if successes == n else min(centre + half, 1.0)
    return low, high


def bootstrap_interval(means: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of `means`, one per prompt: prompts are resampled with replacement 1000
    times (Efron 1979). Too narrow for a dozen prompts or fewer."""
    values = np.asarray(means, dtype=np.float64)
    generator = np.random.default_rng(0)
    blocks = (generator.integers(len(values), size=(100, len(values))) for _ in range(_RESAMPLES // 100))
    resampled = np.concatenate([values[block].mean(axis=1) for block in blocks])
    low, high = np.quantile(resampled, (0.025, 0.975))
    return float(low), float(high)


def estimate(means: Sequence[float], *, proportion: bool) -> Estimate:
    """Estimates the mean from one mean per prompt. `proportion`: these are means of 0/1 values, and the interval is
    Wilson's, which is conservative however correlated the samples of a prompt are; otherwise it is bootstrapped over
    prompts."""
    value = float(np.mean(means))
    if proportion:
        return Estimate(value, *wilson_interval(min(math.fsum(means), len(means)), len(means)))
    return Estimate(value, *bootstrap_interval(means))


def expected_best(samples: Sequence[float], k: int) -> float:
    """E[max of k of the n samples drawn without replacement] = Σᵢ x₍ᵢ₎ · C(i-1, k-1) / C(n, k), x₍ᵢ₎ ascending.

    For scores 0 and 1 this is the unbiased pass@k of Chen et al. 2021 (arXiv 2107.03374).
    """
    ordered = sorted(samples)
    chances = math.comb(len(ordered), k)
    return sum(value * (math.comb(i, k - 1) / chances) for i, value in enumerate(ordered))


def expected_majority(answers: Sequence[Hashable], scores: Sequence[float], k: int) -> float:
    """E[score of the most frequent answer among k of the n samples drawn without replacement]; self-consistency (Wang et al.
    2022, arXiv 2203.11171) averaged over all subsets rather than resampled.

    Ties are split equally, an answer's score is the mean score of its samples, and None does not vote: only if all k drawn
    samples are None does their mean score count.
    """
    classes: dict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores):
        classes[answer].append(score)
    silent = classes.pop(None, [])
    counts = [len(each) for each in classes.values()]
    share = {c: sum(_mode_share(c, m, counts, len(silent), k) for m in range(1, min(c, k) + 1)) for c in set(counts)}
    weighed = [(share[len(each)], each) for each in classes.values()]
    if silent:
        weighed.append((math.comb(len(silent), k) / math.comb(len(answers), k), silent))
    return math.fsum(weight * float(np.mean(each)) for weight, each in weighed)


def _mode_share(own: int, votes: int, counts: Sequence[int], silent: int, k: int) -> float:
    """Share of the k-subsets in which a given answer with `own` samples gets `votes` votes and no answer gets more; each
    subset is weighted by 1 / (number of answers tied for first)."""
    others = list(counts)
    others.remove(own)
    # ways[drawn, tied]: number of ways to draw from the answers so far
    exact = sum(counts) + silent > _MAX_FLOAT_SAMPLES
    ways = np.zeros((k - votes + 1, (k - votes) // votes + 1), dtype=object if exact else np.float64)
    ways[0, 0] = math.comb(own, votes)
    for count in others:
        ways = _draw(ways, count, votes, is_silent=False)
    ways = _draw(ways, silent, votes, is_silent=True)
    chances = math.comb(sum(counts) + silent, k)
    return math.fsum(number / chances / (1 + tied) for tied, number in enumerate(ways[-1].tolist()))


def _draw(ways: np.ndarray, count: int, votes: int, *, is_silent: bool) -> np.ndarray:
    """Extends `ways` by an answer with `count` samples, of which at most `votes` are drawn unless it does not vote."""
    found = np.zeros_like(ways)
    for drawn in range(min(count if is_silent else min(count, votes), len(ways) - 1) + 1):
        tied = int(drawn == votes and not is_silent)
        found[drawn:, tied:] += math.comb(count, drawn) * ways[: len(ways) - drawn, : ways.shape[1] - tied]
    return found


def _votes(samples: Sequence[Sample]) -> list[Hashable]:
    """What each sample of a prompt votes for, None for nothing: all answers that the scorer found right for one, whatever
    their form (1/2 and 0.5, "Paris" and "paris"), a wrong one for its text in lower case."""
    right = {each.answer for each in samples if each.success}
    return [None if (said := each.answer) is None else said in right or said.casefold() for each in samples]


def _best_and_majority(
    scores: Sequence[Sequence[float]], answers: Sequence[Sequence[Hashable]] | None, most: int
) -> Iterator[tuple[int, list[float], list[float]]]:
    """For K = 2, 4, … and `most`, yields each prompt's `expected_best` and, if `answers` are given, `expected_majority`."""
    for k in [*(2**i for i in range(1, most.bit_length()) if 2**i < most), most] if most > 1 else ():
        best = [expected_best(own, min(k, len(own))) for own in scores]
        yield k, best, [expected_majority(a, own, min(k, len(own))) for a, own in zip(answers or (), scores)]


def summarize_samples(prompts: Sequence[Sequence[Sample | None]]) -> dict[str, Any]:
    """Returns `prompts`, `samples`, `dropped`; `success`, `tool_use` and `reward` with `…_low` and `…_high`; and, as fields
    of an `Estimate` each, `avg@N`, `pass@K` and, if the scorer extracts answers, `maj@K` of success, for K = 2, 4, … and
    N, the number of samples asked for. For a prompt with fewer samples, K is capped at their number. `pass@1` equals
    `avg@N`. If all samples were dropped, only the counts."""
    kept = [own for asked in prompts if (own := [each for each in asked if each is not None])]
    samples, most = sum(map(len, kept)), max(map(len, prompts), default=0)
    found: dict[str, Any] = {
        "prompts": len(kept),
        "samples": samples,
        "dropped": sum(map(len, prompts)) - samples,
    }
    if not kept:
        return found
    for name in ("success", "tool_use", "reward"):
        values = [[float(getattr(each, "score" if name == "reward" else name)) for each in own] for own in kept]
        binary = all(value in (0.0, 1.0) for own in values for value in own)
        made = estimate([float(np.mean(own)) for own in values], proportion=binary)
        found |= {name: made.value, f"{name}_low": made.low, f"{name}_high": made.high}
    success = [[each.success for each in own] for own in kept]
    votes = all(each.answers for own in kept for each in own)
    answers = [_votes(own) for own in kept] if votes else None
    means = {f"avg@{most}": [float(np.mean(own)) for own in success]}
    for k, best, majority in _best_and_majority(success, answers, most):
        means |= {f"pass@{k}": best} | ({f"maj@{k}": majority} if votes else {})
    return found | {name: asdict(estimate(of_prompts, proportion=True)) for name, of_prompts in means.items()}


def validation_metrics(prompts: Mapping[str, Sequence[Sequence[Sample | None]]]) -> dict[str, float]:
    """`val-core/{data_source}/reward/…` of the samples of each prompt, by data source.

    A sample of None is missing: `missing` counts these, if any, and everything else is over the other samples and the
    prompts that have any. N is the source's maximum number of samples per prompt, missing ones included. `mean@N` is the
    mean over prompts of a prompt's mean; for K = 2, 4, … and N, `best@K/mean` is `expected_best` and, if the scorer extracts
    answers, `maj@K/mean` is `expected_majority`, with K capped at the prompt's number of samples. If all scores are 0 or 1,
    `mean@N/ci95_low|high` is a Wilson interval that counts prompts.
    """
    samples = [sample for asked in prompts.values() for own in asked for sample in own]
    votes = all(sample.answers for sample in samples if sample is not None)
    metrics: dict[str, float] = {}
    for source, asked in sorted(prompts.items()):
        metrics |= dict(_source_metrics(f"val-core/{source}/reward", asked, votes))
    return metrics


def _source_metrics(prefix: str, asked: Sequence[Sequence[Sample | None]], votes: bool) -> Iterator[tuple[str, float]]:
    most = max(map(len, asked))
    prompts = [found for own in asked if (found := [sample for sample in own if sample is not None])]
    if missing := sum(map(len, asked)) - sum(map(len, prompts)):
        yield f"{prefix}/missing", missing
    if not prompts:
        return
    scores = [[sample.score for sample in own] for own in prompts]
    means = [float(np.mean(own)) for own in scores]
    yield f"{prefix}/mean@{most}", float(np.mean(means))
    if all(value in (0.0, 1.0) for own in scores for value in own):
        made = estimate(means, proportion=True)
        yield f"{prefix}/mean@{most}/ci95_low", made.low
        yield f"{prefix}/mean@{most}/ci95_high", made.high
    answers = [_votes(own) for own in prompts] if votes else None
    for k, best, majority in _best_and_majority(scores, answers, most):
        yield f"{prefix}/best@{k}/mean", float(np.mean(best))
        if votes:
            yield f"{prefix}/maj@{k}/mean", float(np.mean(majority))
