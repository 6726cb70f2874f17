"""`RoutedExperts`: the experts to which a mixture-of-experts model routed the tokens of a context.

A router's choice between nearly equal experts depends on rounding, so different kernels (the engine's and the trainer's) may
choose differently, and their log-probs then differ by more than rounding. Therefore the engine records its choices and the
trainer replays them ("rollout routing replay", Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLUMN = "routed_experts"
"""Batch column: a `RoutedExperts` or None per row, for the row's real (unpadded) tokens from the first on."""


@dataclass(frozen=True)
class RoutedExperts:
    """Expert ids (tokens, MoE layers, experts per token), stored in `ids` as int16 bytes, which can be compared, pickled and
    put into columns."""

    ids: bytes
    layers: int
    top_k: int

    @classmethod
    def of(cls, ids: np.ndarray) -> RoutedExperts:
        """Packs ids (tokens, layers, k)."""
        return cls(np.ascontiguousarray(ids, dtype=np.int16).tobytes(), *ids.shape[1:])

    def __len__(self) -> int:
        return len(self.ids) // self._width

    @property
    def _width(self) -> int:
        return 2 * self.layers * self.top_k

    def array(self) -> np.ndarray:
        """Unpacks the ids (tokens, layers, k)."""
        return np.frombuffer(self.ids, dtype=np.int16).reshape(-1, self.layers, self.top_k)

    def first(self, count: int) -> RoutedExperts:
        """The ids of the first `count` tokens, or of fewer if fewer are known."""
        return RoutedExperts(self.ids[: count * self._width], self.layers, self.top_k)

    def extended(self, longer: RoutedExperts | None) -> RoutedExperts:
        """These ids, plus those of `longer` for later tokens: a token keeps the routing that it was first sampled with."""
        if longer is None:
            return self
        return RoutedExperts(self.ids + longer.ids[len(self.ids) :], self.layers, self.top_k)

    def per_token(self, count: int) -> list[bytes]:
        """The ids of `count` tokens, each as bytes; all -1 for a token whose ids are not known."""
        width = self._width
        known = self.ids[: count * width]
        padded = known + b"\xff" * (count * width - len(known))
        return [padded[i : i + width] for i in range(0, len(padded), width)]
