"""`BatchWorker`: runs the trainer's own functions on batches, in the place where these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from etude.distributed import Dispatch, Execute, register
from etude.workers.role import RoleWorker


class BatchWorker(RoleWorker):
    """Has the user's plug-ins, and the tokenizer where a function asks for it, but no model."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`: a function of a module. Batches among its arguments may have references in their place, and
        those that it returns get them, where this worker is another process."""
        return function(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def run_with_chat(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(chat, *args)` with the model's chat template and tokenizer."""
        return function(self.bundle.chat, *args)
