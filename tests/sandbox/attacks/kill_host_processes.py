# Signals the host's processes by their numbers.
import os
import signal

for pid in (goals["server"], goals["victim"], goals["server"] - 1, 100, 1000):
    for number_ in (signal.SIGUSR1, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(pid, number_)
        except ProcessLookupError:
            continue
        breach(pid)
    refused(lambda: os.pidfd_open(pid), f"pidfd of {pid}")
end()
