# Prints its environment, as it is and as it was; the test looks for the server's.
import os

print(dict(os.environ), open("/proc/self/environ", errors="replace").read())
for name in goals["variables"]:
    if name in os.environ:
        breach(name)
end()
