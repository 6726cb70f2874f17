# Runs out of stack, in the interpreter and below it. expect: finished killed_by_itself time_limit memory_limit | limits: wall_seconds=2 memory_mb=128
sys.setrecursionlimit(1 << 30)


def deeper(depth):
    return deeper(depth + 1)


import threading

threading.stack_size(1 << 16)
deeper(0)
