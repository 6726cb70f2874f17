# Keeps memory in Landlock's rules, of which each process that applies them has a copy.
denied(lambda: libc.syscall(444, (8).to_bytes(8, "little"), 8, 0), "a set of rules")
denied(lambda: libc.syscall(445, 3, 1, b"", 0), "a rule")
denied(lambda: libc.syscall(446, 3, 0), "applied rules")
end()
