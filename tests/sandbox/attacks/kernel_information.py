# Reads what /proc tells about the whole machine.
for name in ("kcore", "kallsyms", "keys", "timer_list", "iomem", "cmdline", "modules", "kmsg", "sched_debug", "mdstat"):
    refused(lambda: open(f"/proc/{name}", "rb").read(1), name)
denied(lambda: syscall(number(103, 116), 3, ctypes.create_string_buffer(100), 100), "syslog")
end()
