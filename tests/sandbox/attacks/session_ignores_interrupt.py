# session: does not let itself be interrupted. timeout: 0.5
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    pass
