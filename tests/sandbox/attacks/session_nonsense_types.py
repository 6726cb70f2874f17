# session: answers with fields of every wrong type.
import json
import struct

text = json.dumps({"cell": 2, "parts": [["text", -1], [{"a": 1}, 2.5], "error"], "images": {"b": 2}, "stdout": 5}).encode()
os.write(3, struct.pack("!II", len(text), 0) + text)
