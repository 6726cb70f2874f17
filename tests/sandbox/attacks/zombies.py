# Leaves children that it never waits for, and orphans in hundreds. limits: processes=40
for _ in range(300):
    try:
        if os.fork() == 0:
            os.fork()
            os._exit(0)
    except OSError:
        pass
end()
