# Takes memory in what closed sockets have sent to one that nobody has accepted yet. expect: memory_limit | limits: memory_mb=128
import socket
import time

listener = socket.socket(socket.AF_UNIX)
listener.bind("\0listener")
listener.listen(4096)
total = 0
for _ in range(4000):
    sender = socket.socket(socket.AF_UNIX)
    sender.connect("\0listener")
    sender.setblocking(False)
    try:
        while total < 500 << 20:
            total += sender.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    sender.close()
    if total >= 500 << 20:
        time.sleep(3)
        breach(f"{total >> 20} MiB by three descriptors")
        break
