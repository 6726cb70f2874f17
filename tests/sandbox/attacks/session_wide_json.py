# session: answers with 27 MiB of empty objects, which would be a gigabyte once parsed.
import struct

text = b'{"cell":2,"parts":[' + b"{}," * (9 << 20) + b"{}]}"
data = memoryview(struct.pack("!II", len(text), 0) + text)
while data:
    data = data[os.write(3, data[:65536]) :]
