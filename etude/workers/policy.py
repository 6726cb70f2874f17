"""`ActorRolloutRefWorker`: actor, reference and rollout in one process, where actor and rollout share the weights.

Invariant: nothing is rolled out on weights that the engine was not told of: an engine in this process samples from the very
tensors that the actor updates, and what it cached of earlier ones would be wrong.
"""

from __future__ import annotations

from etude.distributed import Dispatch, register
from etude.workers.actor import TrainWorker
from etude.workers.rollout import RolloutWorker


class ActorRolloutRefWorker(TrainWorker, RolloutWorker):
    """Samples, computes log-probs and learns."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """As both: the model is loaded once."""
        TrainWorker.init_model(self, total_steps)
        self.start_engine(self._actor)

    def weights_changed(self) -> None:
        """`update_weights` is due before the next rollout."""
        self._link.is_current = False
