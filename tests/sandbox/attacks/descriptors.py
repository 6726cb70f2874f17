# Opens files, pipes and sockets without end. limits: open_files=64
import socket

held = []
for make in (lambda: os.open("/dev/null", 0), lambda: os.dup(1), lambda: os.pipe(), lambda: socket.socketpair()):
    try:
        while len(held) < 5000:
            held.append(make())
    except OSError:
        pass
if len(held) > 64:
    breach(len(held))
os.closerange(3, 70)
end()
