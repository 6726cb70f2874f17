# Spends its time inside one call of native code. expect: time_limit | limits: wall_seconds=0.5
import re

re.match(r"(a|aa)+$", "a" * 10_000 + "b")
re.match(r"(a+)+$", "a" * 64 + "b")
