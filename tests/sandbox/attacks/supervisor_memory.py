# Reads and writes the supervisor's memory, environment and descriptors.
import os

for name in ("mem", "environ", "maps", "auxv", "io", "fdinfo", "fd", "map_files", "syscall", "stack"):
    path = f"/proc/1/{name}"
    refused(lambda: os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1), path)
refused(lambda: open("/proc/1/mem", "r+b"), "writing")
refused(lambda: open("/proc/1/clear_refs", "w"), "clear_refs")
end()
