# Takes memory in connections to itself, whose buffers the kernel makes larger as they fill. limits: memory_mb=128
import socket
import time

listener = socket.create_server(("127.0.0.1", 0), backlog=100)
held, total = [], 0
for _ in range(100):
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    held.append((sender, receiver))
    sender.setblocking(False)
    for _ in range(50):
        try:
            total += sender.send(bytes(1 << 20))
        except BlockingIOError:
            time.sleep(0.0005)
            if total > 600 << 20:
                break
if total > 128 << 20:
    breach(f"{total >> 20} MiB in {len(held)} connections")
end()
