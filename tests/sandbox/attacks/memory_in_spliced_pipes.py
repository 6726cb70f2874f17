# Holds whole blocks of socket memory by one byte of each, moved into pipes. limits: memory_mb=128
import socket

one, other = socket.socketpair()
reader, writer = os.pipe()
one.send(bytes(1 << 16))
denied(lambda: libc.splice(other.fileno(), None, writer, None, 1, 0), "splice")
os.write(writer, b"x")
denied(lambda: libc.tee(reader, os.pipe()[1], 1, 0), "tee")
end()
