# Replaces itself by two of its kind for ever. expect: finished time_limit killed_by_itself | limits: wall_seconds=1 processes=40
import os
import sys

program = "import os, sys\nwhile True:\n try:\n  os.fork() or os.execv(sys.executable, [sys.executable, '-c', sys.argv[1], sys.argv[1]])\n except OSError: pass"
os.execv(sys.executable, [sys.executable, "-c", program, program])
