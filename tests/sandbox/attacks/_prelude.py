import ctypes
import json
import os
import platform
import sys

goals = json.loads(sys.argv[1]) if len(sys.argv) > 1 else json.load(open("goals.json"))
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def breach(what):
    print("BREACH", what, flush=True)


def refused(attempt, what):
    try:
        attempt()
    except (OSError, ValueError):
        return
    breach(what)


def denied(call, what):
    if call() >= 0:
        breach(what)


def number(x86_64, aarch64):
    return x86_64 if platform.machine() == "x86_64" else aarch64


def syscall(which, *arguments):
    return libc.syscall(which, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))


def end():
    print("end", flush=True)


# The attack follows.
