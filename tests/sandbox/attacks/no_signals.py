# Blocks and ignores every signal, and waits. expect: time_limit | limits: wall_seconds=0.5
import signal
import time

signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for number_ in signal.valid_signals():
    try:
        signal.signal(number_, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(600)
