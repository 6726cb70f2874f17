# Reads a file that every user of the host may read, by its path and from its folder.
import os

refused(lambda: open(goals["file"]).read(), "content")
refused(lambda: os.stat(goals["file"]), "metadata")
refused(lambda: os.listdir(os.path.dirname(goals["file"])), "folder")
end()
