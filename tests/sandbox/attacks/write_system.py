# Writes wherever a system keeps programs, libraries and settings.
import os

for folder in ("/", "/usr", "/usr/bin", "/usr/lib", "/usr/local/lib", "/bin", "/lib", "/etc", "/dev", "/opt", "/proc"):
    refused(lambda: open(f"{folder}/{goals['marker']}", "w"), folder)
    refused(lambda: os.mkdir(f"{folder}/{goals['marker']}"), folder)
    refused(lambda: os.chmod(folder, 0o777), folder)
refused(lambda: open("/etc/ld.so.preload", "w"), "ld.so.preload")
refused(lambda: open("/etc/ld.so.cache", "r+"), "ld.so.cache")
refused(lambda: os.truncate("/usr/bin/env", 0), "truncate")
refused(lambda: os.utime("/usr"), "utime")
end()
