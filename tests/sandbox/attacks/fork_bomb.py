# Forks without end. expect: finished time_limit killed_by_itself | limits: wall_seconds=1 processes=40
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
