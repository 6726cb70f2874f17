"""The child process of `algebra.py`: answers one question per line of standard input with `1` or `0`.

Invariant: nothing but `ready`, `1` and `0` is written to the parent, whatever the libraries print. It imports nothing
of this package, so that it stays small and starts fast; its time limit is kept by the parent.
"""

from __future__ import annotations

import json
import os
import resource
import sys

MEMORY_BYTES = 4 << 30


def main() -> None:
    """Serves until standard input closes."""
    sys.path[:] = json.loads(sys.argv[1])
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import parse, verify

    def equal(prediction: str, ground_truth: str) -> bool:
        gold = parse(f"${ground_truth}$", parsing_timeout=None)
        found = parse(f"${prediction}$", parsing_timeout=None)
        return bool(verify(gold, found, timeout_seconds=None))

    print("ready", file=parent, flush=True)
    for line in sys.stdin:
        try:
            verdict = equal(*json.loads(line))
        except Exception:  # sympy may raise anything on malformed input, which is not equal
            verdict = False
        print(int(verdict), file=parent, flush=True)


if __name__ == "__main__":
    main()
