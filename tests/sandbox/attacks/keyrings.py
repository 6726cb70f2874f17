# Uses the kernel's keyrings, which no namespace separates from the host user's.
denied(lambda: syscall(number(248, 217), b"user", b"x", b"y", 1, -4), "add_key")
denied(lambda: syscall(number(249, 218), b"user", b"x", None, 0), "request_key")
for operation in (0, 1, 6, 11, 12):
    denied(lambda: syscall(number(250, 219), operation, -4, 0, 0, 0), "keyctl")
end()
