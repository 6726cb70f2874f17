# Traces the supervisor, and a child of its own.
import time

SEIZE, ATTACH, TRACEME = 0x4206, 16, 0
for request in (SEIZE, ATTACH):
    denied(lambda: libc.ptrace(request, 1, 0, 0), "ptrace of process 1")
child = os.fork()
if child == 0:
    time.sleep(1)
    os._exit(0)
denied(lambda: libc.ptrace(ATTACH, child, 0, 0), "ptrace of a child")
denied(lambda: libc.ptrace(TRACEME, 0, 0, 0), "traceme")
os.kill(child, 9)
end()
