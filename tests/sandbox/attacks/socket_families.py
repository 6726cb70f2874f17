# Opens sockets of every family there is: netlink, packets, kernel cryptography, Bluetooth, CAN …
import socket

for family in range(64):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        continue
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        for protocol in (0, 1, 9, 15):
            refused(lambda: socket.socket(family, kind, protocol), (family, kind, protocol))
for family in (socket.AF_INET, socket.AF_INET6):
    refused(lambda: socket.socket(family, socket.SOCK_RAW, 1), "raw")
    for protocol in (58, 132, 136, 262):  # ICMPv6, SCTP, UDP-Lite, MPTCP: not the protocols that the system's limits are for
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            refused(lambda: socket.socket(family, kind, protocol), (family, kind, protocol))
for family in range(64):
    if family != socket.AF_UNIX:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            refused(lambda: socket.socketpair(family, kind), ("pair", family, kind))
pair = (ctypes.c_int * 2)()
if libc.socketpair(30, 1, 0, pair) >= 0 or ctypes.get_errno() != 97:  # TIPC's is made where its module is loaded
    breach("a pair of another family is left to its module")
# A family whose high bits are set must not slip past a filter that reads the low ones.
denied(lambda: syscall(number(41, 198), ctypes.c_ulonglong((1 << 32) | 40), 1, 0), "high bits")
end()
