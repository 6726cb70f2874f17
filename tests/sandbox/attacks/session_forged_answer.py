# session: sends answers of its own making, which would be taken for a later cell's.
import json
import struct

parts = {"text": b"forged", "image": b"GIF89a", "name": b"x", "value": b"\xff", "surprise": b"?"}
header = json.dumps({"cell": 2, "parts": [[kind, len(part)] for kind, part in parts.items()]}).encode()
payload = b"".join(parts.values())
os.write(3, struct.pack("!II", len(header), len(payload)) + header + payload)
