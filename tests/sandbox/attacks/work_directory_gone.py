# Removes and replaces the work directory itself. fetch: main.py
import shutil

refused(lambda: os.rename("/sandbox", "/tmp/moved"), "rename")
refused(lambda: os.rmdir("/sandbox"), "rmdir")
shutil.rmtree("/sandbox", ignore_errors=True)
refused(lambda: os.symlink("/etc", "/sandbox"), "symlink")
end()
