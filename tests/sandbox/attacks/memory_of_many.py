# Takes memory in many processes, each within its own limit. expect: memory_limit | limits: memory_mb=128
import os
import time

for _ in range(20):
    if os.fork() == 0:
        block = bytearray(b"x" * (40 << 20))
        time.sleep(60)
time.sleep(60)
