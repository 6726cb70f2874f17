# Goes to the host's root through other processes' root, working directory and descriptors.
import glob
import os

for path in [*glob.glob("/proc/*/root"), *glob.glob("/proc/*/cwd"), *glob.glob("/proc/*/task/*/root")]:
    refused(lambda: os.stat(path + goals["file"]), path)
    refused(lambda: os.stat(path + "/../../.." + goals["file"]), path)
for path in glob.glob("/proc/[0-9]*/fd/*"):
    refused(lambda: os.stat(path + "/.." + goals["file"]), path)
end()
