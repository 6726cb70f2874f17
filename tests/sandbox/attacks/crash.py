# Crashes the interpreter. expect: killed_by_itself
ctypes.string_at(0)
