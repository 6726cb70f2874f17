# Leaves a pipe, a socket and a folder where files are asked for, to hang or crash who reads them. fetch: a b c
import socket

os.mkfifo("a")
socket.socket(socket.AF_UNIX).bind("b")
os.mkdir("c")
end()
