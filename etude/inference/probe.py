"""The weight probe: checks that the engine samples from the weights it was sent.

After a weight sync, the engine samples a few tokens for each of a few prompts, and the trainer computes the log-probs of the
same tokens with its own weights. The log-probs must agree up to rounding, and the tokens must carry the version that was
sent. An engine that keeps old weights, mixes them with new ones, or reports log-probs of another distribution than the one
it samples from (before temperature, for instance) is caught here rather than by a run that does not learn.

An engine that keeps its weights draws the same tokens with the same log-probs each time: it is caught as soon as the
trainer's log-probs of these have moved by a fraction of the tolerance, over however many steps. What the probe cannot detect
is other weights that differ by so little that no log-prob moves by more than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from etude.errors import EtudeError
from etude.inference.types import Engine, SamplingParams, TokenOutput
from etude.seeds import probe_seed
from etude.timeouts import gather

TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest allowed log-prob difference in nats, by the trainer's dtype: many times the measured rounding error
(`docs/engines.md`), and far below the effect of different weights."""

Score = Callable[[Sequence[tuple[Sequence[int], Sequence[int]]], float], Sequence[Sequence[float]]]
"""The trainer's log-probs of responses, given (prompt, response) ids and the temperature."""


_MOVED = 0.02  # of the tolerance: movements of the trainer's log-probs that are more than rounding
_STILL = 0.1  # of the trainer's movement: an engine that moves less has not taken the weights


class WeightMismatch(EtudeError):
    """The engine does not serve the trainer's weights."""


@dataclass(frozen=True)
class ProbeResult:
    """The largest and mean log-prob difference, in nats, over the `tokens` compared."""

    largest: float
    mean: float
    tokens: int


@dataclass(frozen=True)
class ProbeDraws:
    """What the engine `name` sampled for the probe's prompts with weights of `version`: (prompt, response) ids, and the
    log-probs of all responses, concatenated. They may differ from the trainer's by `tolerance` nats."""

    name: str
    version: int
    rows: list[tuple[list[int], list[int]]]
    log_probs: list[float]
    tolerance: float

    def judge(self, expected: Sequence[float]) -> ProbeResult:
        """Compares the log-probs with the trainer's for the same tokens.

        Raises:
            WeightMismatch: they differ by more than the tolerance, there are none, or the trainer's are not finite.
        """
        name, version, actual = self.name, self.version, self.log_probs
        if not actual:
            raise WeightMismatch(f"{name} sampled no token from the probe's prompts: is max_model_len too small?")
        if not all(map(math.isfinite, expected)):
            raise WeightMismatch(
                f"the trainer's own log-probs at version {version} are not finite: the weights are broken"
            )
        differences = [abs(e - a) for e, a in zip(expected, actual)]
        result = ProbeResult(max(differences), sum(differences) / len(differences), len(differences))
        if len(expected) != len(actual) or not result.largest <= self.tolerance:
            raise WeightMismatch(
                f"{name} does not serve version {version} of the weights: its log-probs differ from the trainer's by up "
                f"to {result.largest:.3g} nats ({result.mean:.3g} on average, {result.tokens} tokens), the tolerance is "
                f"{self.tolerance:g} (rollout.weight_probe_tolerance). The weight update had no or a wrong effect, or "
                "the engine reports log-probs of another distribution than it samples from; see docs/engines.md"
            )
        return result

    def judge_again(self, before: ProbeDraws) -> ProbeResult:
        """Compares with an earlier draw from the same weights and prompts. Each response is compared up to the first token
        that differs, since rounding may tip a draw.

        Raises:
            WeightMismatch: log-probs differ by more than the tolerance, or every response differs from its first token on.
        """
        mine, theirs = self._by_prompt(), before._by_prompt()
        pairs = [
            pair
            for one, other in zip(mine, theirs)
            for pair in takewhile(lambda both: both[0][0] == both[1][0], zip(one, other))
        ]
        if not pairs:
            raise WeightMismatch(
                f"{self.name} draws other tokens from version {self.version} of the weights than before"
            )
        values = [[pair[side][1] for pair in pairs] for side in (0, 1)]
        return replace(self, log_probs=values[0]).judge(values[1])

    def _by_prompt(self) -> list[list[tuple[int, float]]]:
        values = iter(self.log_probs)
        return [[(token, next(values)) for token in response] for _, response in self.rows]


def _largest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


class WeightProbe:
    """`prompts`: ids of a few short texts; `tokens`: how many to sample for each; `temperature`: that of the rollouts;
    `score`: None if draws are judged elsewhere."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        score: Score | None,
        *,
        tolerance: float,
        temperature: float = 1.0,
        tokens: int = 8,
    ) -> None:
        self._prompts, self._score = [list(prompt) for prompt in prompts], score
        self._tolerance, self._temperature, self._tokens = tolerance, temperature or 1.0, tokens
        self._last: dict[
            str, tuple[ProbeDraws, list[float]]
        ] = {}  # name → what it drew when it last moved, as scored then

    async def check(self, engine: Engine, version: int, name: str = "the engine") -> ProbeResult:
        """Samples from the engine and compares log-probs; the engine must have no other requests meanwhile.

        Raises:
            WeightMismatch: log-probs differ by more than the tolerance, or tokens carry another weight version.
            EngineError: the engine failed to sample.
        """
        return self.judge(await self.draw(engine, version, name))

    def judge(self, drawn: ProbeDraws) -> ProbeResult:
        """Compares the draws with the trainer's log-probs.

        Raises:
            WeightMismatch: they differ by more than the tolerance, or have stayed what they were while the trainer's moved.
        """
        assert self._score is not None
        expected = [value for row in self._score(drawn.rows, self._temperature) for value in row]
        result = drawn.judge(expected)
        before, scored = self._last.get(drawn.name, (None, []))
        if before is None or before.rows != drawn.rows:
            self._last[drawn.name] = drawn, expected
            return result
        moved, own = _largest(expected, scored), _largest(drawn.log_probs, before.log_probs)
        if moved > _MOVED * self._tolerance:
            if own < _STILL * moved:
                raise WeightMismatch(
                    f"{drawn.name} was given the weights of version {drawn.version} and still draws as at version "
                    f"{before.version}: the trainer's log-probs have moved by up to {moved:.3g} nats since, its own by "
                    f"{own:.3g}. The weight update had no effect; see docs/engines.md"
                )
            self._last[drawn.name] = drawn, expected
        return result

    async def draw(self, engine: Engine, version: int, name: str = "the engine") -> ProbeDraws:
        """Samples from the engine; unchanged weights give the same tokens each time, up to rounding.

        Raises:
            WeightMismatch: tokens carry another weight version.
            EngineError: the engine failed to sample.
        """
        names = [f"probe/{version}/{place}" for place in range(len(self._prompts))]

        async def sample(request: str, ids: Sequence[int]) -> TokenOutput:
            seed = probe_seed(request.rpartition("/")[2])  # the same for every version
            params = SamplingParams(self._temperature, max_tokens=self._tokens, seed=seed)
            try:
                return await engine.generate(request, ids, params)
            finally:
                engine.close(request)  # immediately: a deterministic engine waits for open trajectories

        engine.open(names)
        try:
            outputs = await gather(map(sample, names, self._prompts))
        finally:
            for each in names:
                engine.close(each)
        served = sorted({v for output in outputs for v in output.weight_versions} - {version})
        if served:
            raise WeightMismatch(
                f"{name} was given the weights of version {version} and samples from version {served[0]}: "
                "the weight sync does not work with this engine"
            )
        rows = [(prompt, output.token_ids) for prompt, output in zip(self._prompts, outputs) if output.token_ids]
        return ProbeDraws(name, version, rows, [v for output in outputs for v in output.log_probs], self._tolerance)
