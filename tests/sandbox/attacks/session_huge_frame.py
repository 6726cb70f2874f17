# session: announces a frame of four gigabytes, and begins to send it.
os.write(3, b"\xff" * 8)
for _ in range(100):
    os.write(3, b"x" * 65536)
