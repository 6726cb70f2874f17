# Locks memory, so that the host cannot swap it out.
block = ctypes.create_string_buffer(8 << 20)
denied(lambda: libc.mlock(block, 8 << 20), "mlock")
denied(lambda: libc.mlockall(3), "mlockall")
end()
