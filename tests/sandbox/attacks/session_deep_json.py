# session: answers with JSON that is nested a million deep, and with numbers of a million digits.
import struct

for text in (b"[" * 1_000_000, b'{"cell":' + b"1" * 1_000_000 + b"}"):
    os.write(3, struct.pack("!II", len(text), 0))
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(3, rest[:65536]) :]
