"""`RoutedExperts`: which experts of a mixture the tokens of a context went to.

A router's choice between nearly equal experts depends on rounding, so that two kernels (an engine's and a trainer's) may
choose differently, and their log-probs then differ by more than rounding. So the engine records its choices and the trainer
repeats them ("rollout routing replay", Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLUMN = "routed_experts"
"""Of a batch: a `RoutedExperts` a row, or None; of the row's real tokens, from the first on."""


@dataclass(frozen=True)
class RoutedExperts:
    """Ids (tokens, layers with experts, experts per token) as int16 in `ids`: a plain value, as columns, comparisons and
    pickles want it."""

    ids: bytes
    layers: int
    top_k: int

    @classmethod
    def of(cls, ids: np.ndarray) -> RoutedExperts:
        """From ids (tokens, layers, k)."""
        return cls(np.ascontiguousarray(ids, dtype=np.int16).tobytes(), *ids.shape[1:])

    def __len__(self) -> int:
        return len(self.ids) // self._width

    @property
    def _width(self) -> int:
        return 2 * self.layers * self.top_k

    def array(self) -> np.ndarray:
        """The ids (tokens, layers, k)."""
        return np.frombuffer(self.ids, dtype=np.int16).reshape(-1, self.layers, self.top_k)

    def first(self, count: int) -> RoutedExperts:
        """Those of the first `count` tokens, or of fewer where fewer are known."""
        return RoutedExperts(self.ids[: count * self._width], self.layers, self.top_k)

    def extended(self, longer: RoutedExperts | None) -> RoutedExperts:
        """These, and those of `longer` for the tokens after them: what a token was first sampled with stays."""
        if longer is None:
            return self
        return RoutedExperts(self.ids + longer.ids[len(self.ids) :], self.layers, self.top_k)

    def per_token(self, count: int) -> list[bytes]:
        """The ids of `count` tokens, each as bytes; -1s where a token's are not known."""
        width = self._width
        known = self.ids[: count * width]
        padded = known + b"\xff" * (count * width - len(known))
        return [padded[i : i + width] for i in range(0, len(padded), width)]
