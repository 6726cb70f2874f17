# Prints for ever. expect: time_limit | limits: wall_seconds=1 output_bytes=10000
while True:
    os.write(1, b"x" * 65536)
    os.write(2, b"y" * 65536)
