# Searches its own memory, a copy of the fork server's, for the secret that another run had in its code and input.
import re

pattern = re.compile(rb"canary[-][0-9a-f]{32}")
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        start, end_ = (int(part, 16) for part in line.split()[0].split("-"))
        if "r" not in line.split()[1] or line.rstrip().endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
            continue
        try:
            memory.seek(start)
            for found in pattern.findall(memory.read(end_ - start)):
                breach(found)
        except (OSError, ValueError, OverflowError):
            continue
end()
