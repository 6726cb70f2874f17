# Takes memory that processes share, so that none of them holds much alone. expect: memory_limit | limits: memory_mb=128
import mmap
import os
import time

blocks = []
for _ in range(20):
    block = mmap.mmap(-1, 40 << 20)
    if os.fork() == 0:
        for start in range(0, 40 << 20, 4096):
            block[start] = 1
        time.sleep(60)
    block.close()
time.sleep(60)
