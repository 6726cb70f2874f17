# Sends datagrams to a socket of the host; the test looks whether one came.
import socket

link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
for address in ("127.0.0.1", "255.255.255.255", "224.0.0.1", *goals["addresses"]):
    try:
        link.sendto(b"out", (address, goals["udp_port"]))
    except OSError:
        continue
    if address != "127.0.0.1":  # its own loopback, where nobody listens
        breach(address)
end()
