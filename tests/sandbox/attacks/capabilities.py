# Looks for capabilities, and for ways to gain them.
import os
import shutil

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
    if int(status[name], 16):
        breach(name)
if int(status["NoNewPrivs"]) != 1 or int(status["Seccomp"]) != 2:
    breach("no filter")
shutil.copy("/bin/true", "program")
value = bytes.fromhex("0100000200000020000000000000000000000000")
refused(lambda: os.setxattr("program", "security.capability", value), "file capabilities")
for capability in range(41):
    denied(lambda: libc.prctl(47, 2, capability, 0, 0), "ambient")
    denied(lambda: libc.prctl(28, 0x2F), "securebits")
end()
