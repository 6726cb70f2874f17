# Opens, unlocks and unmounts what hides the rest of /proc. limits: memory_mb=256
own = {"self", "thread-self", "meminfo", "stat", "net", "mounts"}
for name in os.listdir("/proc"):
    path = f"/proc/{name}"
    if name in own or name.isdigit():
        continue
    refused(lambda: os.listdir(path) if os.path.isdir(path) else open(path).read(), path)
    denied(lambda: libc.umount2(path.encode(), 2), f"umount {name}")
    refused(lambda: os.rename(path, "/proc/moved"), f"rename {name}")
    try:
        os.chmod(path, 0o755)
        if (os.listdir(path) if os.path.isdir(path) else open(path).read()) not in ([], ""):
            breach(path)
    except OSError:
        pass
if "256" not in str(int(open("/proc/meminfo").readline().split()[1]) >> 10):
    breach("the memory of the machine")
if any(int(field) for field in open("/proc/stat").readline().split()[1:]):
    breach("the machine's load")
end()
