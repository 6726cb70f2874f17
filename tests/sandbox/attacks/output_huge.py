# Prints 60 MB, and the same on the error stream. limits: output_bytes=10000
line = "x" * 99 + "\n"
for _ in range(600):
    sys.stdout.write(line * 1000)
    sys.stderr.write(line * 1000)
end()
