# Takes memory in datagrams whose senders are closed, a few in each of many sockets. expect: memory_limit | limits: memory_mb=128
import socket
import time

held, total = [], 0
for _ in range(220):
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind("")
    held.append(receiver)
    for _ in range(10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            total += sender.sendto(bytes(200 << 10), receiver.getsockname())
time.sleep(3)
breach(f"{total >> 20} MiB by {len(held)} descriptors")
