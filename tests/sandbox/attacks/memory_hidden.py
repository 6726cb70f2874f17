# Takes memory in processes that have made themselves unreadable. expect: memory_limit | limits: memory_mb=128
import time

libc.prctl(4, 0, 0, 0, 0)
for _ in range(20):
    if os.fork() == 0:
        block = bytearray(b"x" * (40 << 20))
        time.sleep(60)
time.sleep(60)
