# Keeps swapping a file for a link while it is read, from a process that outlives the program. fetch: a
open("a", "w").write("harmless")
if os.fork() == 0:
    os.setsid()
    while True:
        os.symlink(goals["file"], "b")
        os.rename("b", "a")
        open("b", "w").write("harmless")
        os.rename("b", "a")
end()
os._exit(0)
