# Leaves a daemon that keeps stdout and stderr open, so that a reader would wait for it.
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
end()
