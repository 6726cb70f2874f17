# Lists home folders, logs, mail, run-time state and the host's kernel interface.
import os

for path in ("/home", "/root/.ssh", "/root/.bash_history", "/var", "/run", "/sys", "/boot", "/mnt", "/media", "/srv"):
    if os.path.exists(path):
        breach(path)
interpreter = os.path.dirname(os.path.dirname(os.path.dirname(os.__file__)))
for folder, folders, files in os.walk("/root"):
    if files and not folder.startswith(interpreter):
        breach((folder, files))
    if folder == interpreter:
        folders.clear()
end()
