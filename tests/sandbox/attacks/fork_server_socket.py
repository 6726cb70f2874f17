# Looks for the fork server's and the supervisor's sockets among its own objects and descriptors, and speaks to them.
import gc
import json
import socket

gc.unfreeze()
message = json.dumps({"id": 99}).encode()
for thing in gc.get_objects():
    if isinstance(thing, socket.socket):
        try:
            thing.send(message)
        except OSError:
            continue
        breach(thing)
for fd in range(3, 64):
    refused(lambda: os.write(fd, message), fd)
end()
