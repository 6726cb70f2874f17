# Fills every folder it may write. limits: disk_mb=16 file_size_mb=8
import os

written = 0
for folder in (".", "/tmp", "/dev/shm", "/box", "/var/tmp", "/run", "/dev", "/"):
    for number_ in range(100):
        try:
            with open(f"{folder}/fill-{number_}", "wb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            if error.errno != 27:  # more than a file may have: go on with the next
                break
if not 1 << 20 < written <= 17 << 20:
    breach(written)
end()
