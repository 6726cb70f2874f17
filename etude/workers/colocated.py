"""`ActorRolloutRefWorker`: actor, reference and rollout in one process; actor and rollout share the weights.

Invariant: no rollout starts before the engine is notified of new weights: an in-process engine samples from the tensors
that the actor updates, so without the notification its caches would be stale.
"""

from __future__ import annotations

from etude.distributed import Dispatch, register
from etude.workers.actor import TrainWorker
from etude.workers.rollout import RolloutWorker


class ActorRolloutRefWorker(TrainWorker, RolloutWorker):
    """Samples, computes log-probs and trains."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """Initialises both roles on one model, loaded once."""
        TrainWorker.init_model(self, total_steps)
        self.start_engine(self._actor)

    def weights_changed(self) -> None:
        """Requires an `update_weights` before the next rollout."""
        self._link.is_current = False
