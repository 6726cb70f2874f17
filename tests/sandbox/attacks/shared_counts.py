# Uses up what the host's user has once for all: slots of asynchronous input and output, inotify, locks, huge pages, disk.
import mmap
import signal

context = ctypes.c_ulong()
denied(lambda: syscall(number(206, 0), 65000, ctypes.byref(context)), "io_setup")
denied(lambda: libc.inotify_init1(0), "inotify_init1")
if os.uname().machine == "x86_64":
    denied(lambda: syscall(253), "inotify_init")
library = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
signal.signal(signal.SIGIO, lambda *_: breach("news of a shared folder"))
denied(lambda: libc.fcntl(library, 1026, 1 | 1 << 31), "F_NOTIFY")
interpreter = os.open(os.__file__, os.O_RDONLY)
denied(lambda: libc.fcntl(interpreter, 1024, 0), "F_SETLEASE")
own = os.open("own", os.O_CREAT | os.O_RDONLY)
denied(lambda: libc.fcntl(own, 1024, 0), "F_SETLEASE of an own file")  # as those of a host that is not root would be
refused(lambda: mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000), "huge pages")
refused(lambda: mmap.mmap(-1, 1 << 20), "shared memory without a file")
block = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
refused(lambda: block.madvise(21), "paging out")
# What succeeds must do nothing: on a descriptor that is none the kernel's own would fail.
for name, calls in (("syncfs", (306, 267)), ("fsync", (74, 82)), ("fdatasync", (75, 83)), ("sync_file_range", (277, 84))):
    if syscall(number(*calls), -1, 0, 0, 0) != 0:
        breach(f"{name} reached the kernel")
if syscall(number(221, 223), -1, 0, 0, 4) != 0:
    breach("POSIX_FADV_DONTNEED reached the kernel")
if syscall(number(26, 227), 1, 1, 4) != 0:
    breach("msync reached the kernel")
os.sync()
end()
