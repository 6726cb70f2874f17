"""Free memory goes back to the system; by itself glibc keeps much of it. Nothing happens with another C library."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


class _HeapUse(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer: `free` is `fordblks`, the free bytes of all heaps."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t))


def trim_heap() -> None:
    """Returns free memory to the system, if it is a gigabyte or more. Rollouts and updates take turns, in threads with a
    heap each in glibc, which holds on to what one of them freed: a quarter of the memory of a model of 135 M parameters.
    A small model keeps its half gigabyte: to fault its pages in again took a fifth of an update's CPU time."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _HeapUse
        if libc.mallinfo2().free >= 2**30:
            libc.malloc_trim(0)


def return_large_blocks() -> None:
    """Makes glibc return freed blocks of 4 MiB and more to the system at once, in this process. By itself it keeps up to 32
    MiB a block for reuse, and layers that are computed again leave holes: half of the memory of a model of 135 M parameters.
    It costs 2 % of that update's CPU time, in pages that are faulted in again; `trim_heap` does the rest."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 4 << 20)
