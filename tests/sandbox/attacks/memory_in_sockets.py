# Takes memory in the buffers of sockets that are full, as large as they come. expect: memory_limit | limits: memory_mb=128
import resource
import socket
import time

for option in (7, 8, 32, 33):  # SO_SNDBUF, SO_RCVBUF and what overrides the system's limits
    one, other = socket.socketpair()
    before = one.getsockopt(1, 7), one.getsockopt(1, 8)
    try:
        one.setsockopt(socket.SOL_SOCKET, option, 1 << 24)
    except OSError:
        pass
    if (one.getsockopt(1, 7), one.getsockopt(1, 8)) != before:
        breach(f"option {option}")


def fill():
    held, total = [], 0
    try:
        while True:
            one, other = socket.socketpair()
            one.setblocking(False)
            held.append((one, other))
            while True:
                try:
                    total += one.send(bytes(1 << 16))
                except BlockingIOError:
                    break
    except OSError:
        pass
    return held, total


for _ in range(8):
    if os.fork() == 0:
        held = fill()
        time.sleep(60)
time.sleep(5)
breach("8 x 120 full sockets")
