# Takes memory that belongs to no process: in-memory files and System V objects.
denied(lambda: syscall(number(319, 279), b"x", 0), "memfd_create")
denied(lambda: libc.shmget(0, 1 << 28, 0o1600), "shmget")
denied(lambda: libc.msgget(0, 0o1600), "msgget")
denied(lambda: libc.semget(0, 1000, 0o1600), "semget")
end()
