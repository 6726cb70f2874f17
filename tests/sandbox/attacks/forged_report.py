# Writes what looks like a supervisor's report to everything it can write to.
import json
import struct

text = json.dumps({"event": "broken", "error": "not my fault", "status": "finished", "code": 0, "files": []}).encode()
frame = struct.pack("!II", len(text), 0) + text
for fd in range(64):
    if fd not in (1, 2):
        refused(lambda: os.write(fd, frame), fd)
os.write(1, frame + b"\n")
end()
