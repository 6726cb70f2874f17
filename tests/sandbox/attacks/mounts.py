# Mounts, remounts and unmounts, by the old calls and the new ones.
denied(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), "mount")
denied(lambda: libc.mount(b"/", b"/tmp", None, 4096, None), "bind mount")
denied(lambda: libc.mount(b"none", b"/", None, 32, None), "remount")
denied(lambda: libc.mount(b"none", b"/usr", None, 32 | 4096, None), "remount of /usr")
for path in (b"/proc", b"/sandbox", b"/tmp", b"/usr", b"/"):
    denied(lambda: libc.umount2(path, 2), f"umount {path}")
denied(lambda: syscall(428, -100, b"/", 1), "open_tree")
denied(lambda: syscall(429, -100, b"/tmp", -100, b"/usr", 0), "move_mount")
denied(lambda: syscall(430, b"tmpfs", 0), "fsopen")
denied(lambda: syscall(433, -100, b"/", 0), "fspick")
denied(lambda: syscall(442, -100, b"/", 0, ctypes.create_string_buffer(32), 32), "mount_setattr")
denied(lambda: syscall(number(155, 41), b"/tmp", b"/tmp"), "pivot_root")
end()
