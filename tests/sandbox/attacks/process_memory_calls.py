# Reads and writes the supervisor's memory by the calls made for it, and takes its descriptors.
import struct

buffer = ctypes.create_string_buffer(16)
local = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(buffer), 8), 16)
remote = ctypes.create_string_buffer(struct.pack("=QQ", 0x400000, 8), 16)
denied(lambda: syscall(number(310, 270), 1, local, 1, remote, 1, 0), "process_vm_readv")
denied(lambda: syscall(number(311, 271), 1, local, 1, remote, 1, 0), "process_vm_writev")
pidfd = os.pidfd_open(1)
for fd in range(64):
    denied(lambda: syscall(438, pidfd, fd, 0), "pidfd_getfd")
denied(lambda: syscall(440, pidfd, local, 1, 21, 0), "process_madvise")
denied(lambda: syscall(number(312, 272), 1, os.getpid(), 0, 0, 0), "kcmp")
end()
