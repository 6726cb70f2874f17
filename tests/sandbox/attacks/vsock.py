# Talks to the hypervisor, which no network namespace prevents.
import socket

refused(lambda: socket.socket(40, socket.SOCK_STREAM), "stream")
refused(lambda: socket.socket(40, socket.SOCK_DGRAM), "datagram")
for cid in (0, 1, 2, 3):
    denied(lambda: syscall(number(41, 198), 40, socket.SOCK_STREAM | 0x80000, 0), f"vsock {cid}")
end()
