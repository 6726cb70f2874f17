# Changes builtins, modules and the hidden objects of the process that forked it.
import builtins
import gc
import json
import types

builtins.open = None
json.loads = json.dumps = lambda *a, **k: "BREACH"
sys.path.insert(0, "/tmp")
os.environ["PYTHONSTARTUP"] = "/tmp/x"
gc.unfreeze()
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType) and "guest" in thing.__code__.co_filename:
        try:
            thing.__code__ = (lambda *a, **k: None).__code__
        except ValueError:
            pass
os.write(1, b"end\n")
os._exit(0)
