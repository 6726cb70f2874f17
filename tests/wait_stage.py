"""Waiting for a condition, as long as a busy machine may need for it."""

import asyncio
import time

WAIT = 600  # seconds: for what takes a few


def until(condition, message="it did not happen"):
    """Returns `condition()` once it holds."""
    end = time.monotonic() + WAIT
    while not (value := condition()):
        assert time.monotonic() < end, message
        time.sleep(0.02)
    return value


async def until_async(condition, message="it did not happen", pause=0.002):
    """Returns once `condition()` holds; looks again after `pause` seconds."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, message
        await asyncio.sleep(pause)


def is_running(pid):
    """Whether there is such a process, and it is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
