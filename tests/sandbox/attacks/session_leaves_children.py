# session: leaves children that answer in its place, and a daemon.
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", goals["marker"]])
if os.fork() == 0:
    pass
