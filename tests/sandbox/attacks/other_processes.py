# Looks for anybody else in /proc.
import os

others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
if others:
    breach(others)
for pid in (goals["server"], goals["victim"]):
    for name in ("environ", "cmdline", "mem", "root", "cwd", "exe"):
        refused(lambda: os.stat(f"/proc/{pid}/{name}"), (pid, name))
end()
