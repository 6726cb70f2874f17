"""All seeds that a run derives from the configured ones, so that a repeated step draws the same samples.

| configured | derived here | used for |
|---|---|---|
| `data.seed` | `epoch_order` | the order of rows in an epoch |
| `rollout.seed` | `batch_seed` (step, attempt) → `trajectory_seed` (place in the batch) → `request_seed` (turn) | sampling |
| `rollout.seed` | `batch_seed` → `group_seed` (the prompt's place in the batch) | environments of all its rollouts |
| a client's `seed` | `client_draw` | sampling of a gateway request with a seed |
| a client's `seed` | `request_seed` | the samples of a request of `etude tinker` |
| `actor.data_loader_seed` | `mini_batch_order` | the order of prompt groups in an epoch of updates |
| `trainer.seed` of fine-tuning | `trial_seed` | sampling of its trials |

`etude.inference.sampling.uniforms` derives the random number of each token from the request's seed. Data preparation and
fault injection use their own `random.Random`, seeded with a string.

Invariant: every function depends on its arguments alone: no clock, no global generator, no state. Changing a formula here
changes every run: resumed runs would draw differently.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np

_STRIDE = 1_000_003
_ATTEMPTS = 64  # up to this many batches of a step have distinct seeds
_REQUEST_STRIDE = 97
_CLIENT_DRAWS = 1 << 40  # offset that separates request numbers derived from client seeds from counted ones


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Row numbers in the order of `epoch`: (rows,) int64."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(rows)


def batch_seed(seed: int, step: int, attempt: int = 0) -> int:
    """Seed of the rollouts of one batch; `attempt` counts the batches of a step. Validation is step 0."""
    return (seed * _STRIDE + step) * _ATTEMPTS + attempt


def trajectory_seed(batch: int, index: int) -> int:
    """Seed of the trajectory at index `index` in a step's whole batch: in [0, 2^56)."""
    return _hash(f"{batch}/{index}", 7)


def request_seed(trajectory: int, number: int) -> int:
    """Seed of a trajectory's request, in [0, 2^63): no two turns, branches or sequences share random numbers."""
    return (trajectory * _STRIDE + _REQUEST_STRIDE * number) & 0x7FFFFFFFFFFFFFFF


def group_seed(batch: int, group: int) -> int:
    """Seed of what all rollouts of prompt number `group` of a batch share, such as the reset of their environments: in
    [0, 2^31), as Gymnasium expects. Different groups of a batch have different seeds."""
    return (_hash(f"group/{batch}", 7) + group) & 0x7FFFFFFF


def client_draw(seed: int, choice: int, ids: Sequence[int]) -> int:
    """Request number for a client's own `seed`: identical requests in a session sample identically, but different turns of a
    client that always sends the same seed do not share random numbers."""
    digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()
    return _CLIENT_DRAWS + _hash(f"{seed}/{choice}/{digest}", 5)


def probe_seed(name: str) -> int:
    """Seed of a prompt of the weight probe."""
    return _hash(name, 7)


def trial_seed(seed: int, step: int) -> int:
    """Seed of the trial rollouts during fine-tuning."""
    return seed * _STRIDE + step


def mini_batch_order(seed: Sequence[int], groups: int) -> np.ndarray:
    """Indices of prompt groups in the order of an epoch of updates: (groups,) int64. `seed` is (seed, step, epoch)."""
    numbers = np.arange(groups)
    np.random.default_rng(list(seed)).shuffle(numbers)
    return numbers


def chance(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone; decides which trajectories are traced and which calls fail by fault
    injection."""
    return _hash(text, 7) / 2**56


def _hash(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=size).digest(), "big")
