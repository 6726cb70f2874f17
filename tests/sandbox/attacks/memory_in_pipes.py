# Pins pages in pipes, which hold them when no process has them mapped any more. limits: memory_mb=128 open_files=128
import fcntl
import mmap

held = []


class Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def pin(size):
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(bytes(size))
    view = (ctypes.c_char * size).from_buffer(block)
    span = Span(ctypes.addressof(view), size)
    reader, writer = os.pipe()
    held.extend((reader, writer))
    pinned = libc.vmsplice(writer, ctypes.byref(span), 1, 2)
    del view
    block.close()
    return pinned


denied(lambda: pin(1 << 16), "vmsplice")
reader, writer = os.pipe()
refused(lambda: fcntl.fcntl(writer, 1031, 1 << 20), "F_SETPIPE_SZ")
denied(lambda: syscall(number(72, 25), writer, 1031 | 1 << 32, 1 << 20), "F_SETPIPE_SZ with high bits")
end()
