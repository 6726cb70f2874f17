"""An event loop in virtual time: time limits cost nothing, and a deadlock is an error."""

import asyncio
import functools


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout=None):
            if timeout is None:
                raise RuntimeError("deadlock: nothing is scheduled")
            self._now += timeout
            return select(0)

        self._selector.select = jump

    def time(self):
        return self._now


def run(coroutine):
    loop = VirtualTime()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        leftover = asyncio.all_tasks(loop)
        for task in leftover:
            task.cancel()
        if leftover:
            loop.run_until_complete(asyncio.wait(leftover))
        loop.close()


def in_virtual_time(test):
    """Makes an asynchronous test one that runs in virtual time."""

    @functools.wraps(test)
    def in_its_loop(*args, **kwargs):
        run(test(*args, **kwargs))

    return in_its_loop
