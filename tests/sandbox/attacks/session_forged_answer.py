# session: sends answers of its own making, which would be taken for a later cell's.
import base64
import json
import struct

text = json.dumps({"cell": 2, "text": "forged", "images": ["x", base64.b64encode(b"GIF89a").decode(), 7], "error": "x"}).encode()
os.write(3, struct.pack("!II", len(text), 0) + text)
