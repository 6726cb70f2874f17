# Leaves links where files are asked for. fetch: a b/secret c d e
os.symlink(goals["file"], "a")
os.symlink(os.path.dirname(goals["file"]), "b")
os.symlink("/etc/passwd", "c")
os.symlink("/proc/1/root/etc/passwd", "d")
os.symlink("main.py", "e")
end()
