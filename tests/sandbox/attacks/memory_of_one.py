# Takes more memory than it may, in one piece and in many. limits: memory_mb=128
for size in (1 << 40, 1 << 30):
    try:
        block = bytearray(size)
    except MemoryError:
        continue
    breach(size)
blocks = []
try:
    while len(blocks) < 1000:
        blocks.append(bytearray(b"x" * (1 << 20)))
except MemoryError:
    blocks.clear()
else:
    breach("a thousand MiB")
end()
