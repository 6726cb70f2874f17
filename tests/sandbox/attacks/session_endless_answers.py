# session: answers again and again, but never for this cell.
import json
import struct

text = json.dumps({"cell": -1}).encode()
while True:
    os.write(3, struct.pack("!II", len(text), 0) + text)
