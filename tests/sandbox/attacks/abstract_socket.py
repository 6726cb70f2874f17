# Reaches a socket of the host that has a name but no file, and any other that is listed.
import socket

refused(lambda: socket.socket(socket.AF_UNIX).connect("\0" + goals["abstract"]), "abstract socket")
listed = open("/proc/self/net/unix").read()
if goals["abstract"] in listed:
    breach("listed")
end()
