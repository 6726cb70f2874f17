"""All seeds that a run derives from its configured ones, so that a repeated step draws the same samples.

| configured | derived here | used for |
|---|---|---|
| `data.seed` | `epoch_order` | the order of rows in an epoch |
| `rollout.seed` | `batch_seed` (step, attempt) → `trajectory_seed` (place in the batch) → `request_seed` (turn) | sampling |
| a client's `seed` | `client_draw` | the draw of a gateway request that names a seed |
| `actor.data_loader_seed` | `mini_batch_order` | the order of prompt groups in an epoch of updates |
| `trainer.seed` of fine-tuning | `trial_seed` | sampling of its trials |

From a request's seed, the number behind each token follows in `etude.inference.sampling.uniforms`. Prepared data and
injected faults seed a `random.Random` of their own with a text.

Invariant: a function of its arguments alone: no clock, no global generator, no state. A value that changes here changes
every run: resumed runs would draw differently.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np

_STRIDE = 1_000_003
_ATTEMPTS = 64  # batches of one step have seeds of their own up to this many
_REQUEST_STRIDE = 97
_CLIENT_DRAWS = 1 << 40  # draws named by a client lie beyond those that are counted


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Row numbers in the order of `epoch`: (rows,) int64."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(rows)


def batch_seed(seed: int, step: int, attempt: int = 0) -> int:
    """Of the rollouts of one batch; `attempt` counts the batches of a step. Validation is step 0."""
    return (seed * _STRIDE + step) * _ATTEMPTS + attempt


def trajectory_seed(batch: int, index: int) -> int:
    """Of the trajectory at index `index` of a step's whole batch: in [0, 2^56)."""
    return _hashed(f"{batch}/{index}", 7)


def request_seed(trajectory: int, number: int) -> int:
    """Of a trajectory's request: no two turns, branches or sequences share random numbers. In [0, 2^63)."""
    return (trajectory * _STRIDE + _REQUEST_STRIDE * number) & 0x7FFFFFFFFFFFFFFF


def environment_seed(trajectory: int) -> int:
    """Seed that a trajectory's environment is reset with: in [0, 2^31), as Gymnasium expects."""
    return trajectory & 0x7FFFFFFF


def client_draw(seed: int, choice: int, ids: Sequence[int]) -> int:
    """The request number that a client's own `seed` stands for: the same request draws the same in a session, and turns of
    a client that always sends one seed do not share their random numbers."""
    asked = hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()
    return _CLIENT_DRAWS + _hashed(f"{seed}/{choice}/{asked}", 5)


def probe_seed(name: str) -> int:
    """Of a prompt of the weight probe."""
    return _hashed(name, 7)


def trial_seed(seed: int, step: int) -> int:
    """Of the rollouts that try a model during fine-tuning."""
    return seed * _STRIDE + step


def mini_batch_order(seed: Sequence[int], groups: int) -> np.ndarray:
    """Numbers of prompt groups in the order of an epoch of updates, `seed` being (seed, step, epoch): (groups,) int64."""
    numbers = np.arange(groups)
    np.random.default_rng(list(seed)).shuffle(numbers)
    return numbers


def chance(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone: which trajectories are traced, which calls are made to fail."""
    return _hashed(text, 7) / 2**56


def _hashed(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=size).digest(), "big")
