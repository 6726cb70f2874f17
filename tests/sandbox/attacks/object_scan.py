# Searches the interpreter's objects, and the trusted modules that forked it, for another run's secret.
import gc
import re

gc.unfreeze()
pattern = re.compile("canary[-][0-9a-f]{32}")
for thing in gc.get_objects():
    try:
        text = repr(thing)
    except Exception:
        continue
    if pattern.search(text):
        breach(type(thing))
end()
