# Spends CPU time in processes whose first thread has ended. expect: time_limit | limits: cpu_seconds=1
import threading
import time


def spin():
    while True:
        pass


for _ in range(4):
    if os.fork() == 0:
        threading.Thread(target=spin).start()
        syscall(number(60, 93), 0)
time.sleep(60)
