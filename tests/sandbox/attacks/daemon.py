# Leaves a daemon: forks twice, starts a session, closes everything.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 256)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", goals["marker"]])
    os._exit(0)
os.wait()
end()
