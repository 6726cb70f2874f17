# Ends without the interpreter's end: no flush, no exit handlers, by a signal. expect: killed_by_itself
os.write(1, b"end\n")
os.kill(os.getpid(), 9)
