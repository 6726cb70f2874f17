"""The probe: does the engine sample from the weights it was sent?

After a weight sync, the engine draws a few tokens from each of a few prompts, and the trainer computes the log-probs of the
same tokens with its own weights. They must agree to rounding, and carry the version that was sent. An engine that keeps old
weights, mixes them with new ones, or reports log-probs of another distribution than the one it samples from (before
temperature, for instance) is caught here rather than in a run that does not learn.

What the probe cannot detect: weights that differ by so little that no log-prob moves by more than the tolerance. An engine
that never takes new weights is therefore caught at the first step whose *accumulated* change exceeds it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.errors import EtudeError
from etude.inference.types import Engine, SamplingParams, TokenOutput
from etude.seeds import probe_seed

TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest allowed difference in nats, by the trainer's dtype: many times the measured rounding error (`docs/engines.md`),
and far below the effect of other weights."""

Score = Callable[[Sequence[tuple[Sequence[int], Sequence[int]]], float], Sequence[Sequence[float]]]
"""The trainer's log-probs of responses, given (prompt, response) ids and the temperature."""


class WeightMismatch(EtudeError):
    """The engine does not serve the trainer's weights."""


@dataclass(frozen=True)
class ProbeResult:
    """Differences in nats over the `tokens` compared."""

    largest: float
    mean: float
    tokens: int


class WeightProbe:
    """`prompts`: ids of a few short texts; `tokens` are drawn from each; `temperature` is that of the rollouts."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        score: Score,
        *,
        tolerance: float,
        temperature: float = 1.0,
        tokens: int = 8,
    ) -> None:
        self._prompts, self._score = [list(prompt) for prompt in prompts], score
        self._tolerance, self._temperature, self._tokens = tolerance, temperature or 1.0, tokens

    async def check(self, engine: Engine, version: int, name: str = "the engine") -> ProbeResult:
        """Compares log-probs; the engine must have no other requests meanwhile.

        Raises:
            WeightMismatch: they differ by more than the tolerance, or the tokens carry another version.
            EngineError: the engine failed to sample.
        """
        outputs = await self._draw_all(engine, version)
        served = sorted({v for output in outputs for v in output.weight_versions} - {version})
        if served:
            raise WeightMismatch(
                f"{name} was given the weights of version {version} and samples from version {served[0]}: "
                "the weight sync does not work with this engine"
            )
        drawn = [(prompt, output.token_ids) for prompt, output in zip(self._prompts, outputs) if output.token_ids]
        expected = [value for row in self._score(drawn, self._temperature) for value in row]
        actual = [value for output in outputs for value in output.log_probs]
        return self._judged(expected, actual, version, name)

    async def _draw_all(self, engine: Engine, version: int) -> list[TokenOutput]:
        names = [f"probe/{version}/{place}" for place in range(len(self._prompts))]
        engine.open(names)
        try:
            return await asyncio.gather(*(self._draw(engine, name, ids) for name, ids in zip(names, self._prompts)))
        finally:
            for name in names:
                engine.close(name)

    async def _draw(self, engine: Engine, name: str, ids: Sequence[int]) -> TokenOutput:
        """One prompt's tokens; closed at once, since a deterministic engine waits for open trajectories."""
        try:
            return await engine.generate(name, ids, self._params(name))
        finally:
            engine.close(name)

    def _params(self, name: str) -> SamplingParams:
        return SamplingParams(temperature=self._temperature, max_tokens=self._tokens, seed=probe_seed(name))

    def _judged(self, expected: Sequence[float], actual: Sequence[float], version: int, name: str) -> ProbeResult:
        if not actual:
            raise WeightMismatch(f"{name} sampled no token from the probe's prompts: is max_model_len too small?")
        if not all(map(math.isfinite, expected)):
            raise WeightMismatch(
                f"the trainer's own log-probs at version {version} are not finite: the weights are broken"
            )
        differences = [abs(e - a) for e, a in zip(expected, actual)]
        result = ProbeResult(max(differences), sum(differences) / len(differences), len(differences))
        if len(expected) != len(actual) or not result.largest <= self._tolerance:
            raise WeightMismatch(
                f"{name} does not serve version {version} of the weights: its log-probs differ from the trainer's by up "
                f"to {result.largest:.3g} nats ({result.mean:.3g} on average, {result.tokens} tokens), the tolerance is "
                f"{self._tolerance:g} (rollout.weight_probe_tolerance). The weight update had no or a wrong effect, or "
                "the engine reports log-probs of another distribution than it samples from; see docs/engines.md"
            )
        return result
