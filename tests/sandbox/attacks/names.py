# Asks for a name on the network, with the system's resolver and with a question of its own.
import socket

refused(lambda: socket.getaddrinfo("example.com", 80), "resolver")
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(0.2)
question = b"\0\1\1\0\0\1\0\0\0\0\0\0\7example\3com\0\0\1\0\1"
for server in ("8.8.8.8", "127.0.0.53", "169.254.169.253", "1.1.1.1"):
    refused(lambda: (link.sendto(question, (server, 53)), link.recv(512)), server)
end()
