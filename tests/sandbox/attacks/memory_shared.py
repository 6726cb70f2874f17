# Takes memory that processes share, so that none of them holds much alone. expect: memory_limit | limits: memory_mb=128 disk_mb=256
import mmap
import os
import time

blocks = []
for number in range(5):
    file = os.open(f"/tmp/{number}", os.O_CREAT | os.O_RDWR)
    os.truncate(file, 40 << 20)
    block = mmap.mmap(file, 40 << 20)
    if os.fork() == 0:
        for start in range(0, 40 << 20, 4096):
            block[start] = 1
        time.sleep(60)
    block.close()
time.sleep(60)
