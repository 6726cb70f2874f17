# Prints every small file it can find outside the system's folders; the test looks for the secret in what comes.
import os

skipped = ("/usr", "/proc", "/opt/etude", "/sandbox", "/box", "/etc/alternatives", "/etc/fonts", os.path.dirname(os.path.dirname(os.path.dirname(os.__file__))), "/dev", "/nix")
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if not os.path.join(folder, name).startswith(skipped)]
    for name in files:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.path.getsize(path) < 100_000:
            try:
                print(path, open(path, errors="replace").read()[:2000])
            except OSError:
                pass
end()
