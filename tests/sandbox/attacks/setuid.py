# Becomes root, or anybody else.
import os

for user in (0, 1, 65533, 65534):
    refused(lambda: os.setuid(user), f"setuid {user}")
    refused(lambda: os.setresuid(user, user, user), f"setresuid {user}")
    refused(lambda: os.setgid(user), f"setgid {user}")
    refused(lambda: os.chown("main.py", user, user), f"chown {user}")
refused(lambda: os.setgroups([0]), "setgroups")
end()
