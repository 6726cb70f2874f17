# Symbolic and hard links to what lies outside.
import os

os.symlink(goals["file"], "link")
refused(lambda: open("link").read(), "symbolic link")
refused(lambda: os.link(goals["file"], "hard"), "hard link")
refused(lambda: os.link("/etc/passwd", "hard"), "hard link to a system file")
refused(lambda: os.rename("/etc/passwd", "taken"), "rename")
end()
