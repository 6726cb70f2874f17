# Leaves its process group and session before its time is up. expect: time_limit | limits: wall_seconds=0.5
import time

for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", goals["marker"]])
time.sleep(600)
