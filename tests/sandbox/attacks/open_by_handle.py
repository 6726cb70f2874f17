# Opens the host's root by a guessed file handle, as an escape from containers did.
import struct

NAME_TO_HANDLE, OPEN_BY_HANDLE = number(303, 264), number(304, 265)
handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, 1, 2), 24)
root = os.open("/", os.O_RDONLY)
denied(lambda: syscall(OPEN_BY_HANDLE, root, handle, os.O_RDONLY), "open_by_handle_at")
mount_id = ctypes.c_int()
denied(lambda: syscall(NAME_TO_HANDLE, root, b"usr", handle, ctypes.byref(mount_id), 0), "name_to_handle_at")
end()
