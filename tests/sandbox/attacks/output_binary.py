# Prints every byte there is, halves of characters and terminal commands.
os.write(1, bytes(range(256)) * 100 + b"\xe2\x82" + b"\x1b]0;title\x07\x1b[2J\xff\xfe\0")
os.write(2, b"\xf0\x9f" * 1000)
end()
