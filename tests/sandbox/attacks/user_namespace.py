# Makes a user namespace, where it would be root, by each call that can.
import struct

denied(lambda: libc.unshare(0x10000000), "unshare")
denied(lambda: syscall(number(56, 220), 0x10000000 | 17, 0, 0, 0, 0), "clone")
denied(lambda: syscall(number(56, 220), ctypes.c_ulonglong((1 << 33) | 0x10000000 | 17), 0, 0, 0, 0), "clone, high bits")
arguments = ctypes.create_string_buffer(struct.pack("=11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)
denied(lambda: syscall(435, arguments, 88), "clone3")
for name in ("uid_map", "gid_map", "setgroups"):
    refused(lambda: open(f"/proc/self/{name}", "w").write("0 0 1"), name)
end()
