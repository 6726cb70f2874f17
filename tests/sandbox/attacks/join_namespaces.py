# Joins namespaces of the supervisor, and makes new ones to configure.
for name in ("net", "mnt", "pid", "user", "ipc", "uts", "cgroup"):
    path = f"/proc/1/ns/{name}"
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    denied(lambda: libc.setns(fd, 0), name)
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
    denied(lambda: libc.unshare(flag), hex(flag))
end()
