# Connects to a listener of the host, to the host's addresses, to cloud metadata and to the world.
import socket

for address in ("127.0.0.1", "localhost", "0.0.0.0", "169.254.169.254", "192.0.2.1", "1.1.1.1", *goals["addresses"]):
    refused(lambda: socket.create_connection((address, goals["port"]), timeout=2), address)
for address in ("::1", "::ffff:127.0.0.1", "fe80::1", "2001:db8::1"):
    refused(lambda: socket.create_connection((address, goals["port"]), timeout=2), address)
end()
