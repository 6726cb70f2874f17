# Sends every signal to the supervisor.
import os
import signal

for number_ in sorted(signal.valid_signals() - {0}):
    for pid in (1, os.getppid()):
        try:
            os.kill(pid, number_)
        except OSError:
            pass
end()
