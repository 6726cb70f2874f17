# Takes memory in processes whose first thread has ended: to /proc they are zombies that hold nothing. expect: memory_limit | limits: memory_mb=128
import threading
import time


def hold():
    time.sleep(0.3)  # until it has ended
    block = bytearray(b"x" * (40 << 20))
    time.sleep(3)
    print("BREACH 400 MiB held", len(block), flush=True)
    os._exit(0)


for _ in range(10):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        syscall(number(60, 93), 0)  # exit, of this thread alone
time.sleep(60)
