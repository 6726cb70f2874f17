# session: takes more memory than it may, in many processes. limits: memory_mb=128
import time

for _ in range(10):
    if os.fork() == 0:
        block = bytearray(b"x" * (40 << 20))
        time.sleep(60)
time.sleep(60)
