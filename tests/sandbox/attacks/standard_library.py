# Writes into the interpreter's own libraries, which the next run imports.
import json
import os
import site
import sysconfig

folders = [os.path.dirname(os.__file__), os.path.dirname(json.__file__), *sys.path, sysconfig.get_path("purelib")]
for folder in folders:
    if folder in ("/sandbox", ""):
        continue
    for name in ("sitecustomize.py", "usercustomize.py", f"{goals['marker']}.pth", "json.py", "__pycache__/x"):
        refused(lambda: open(os.path.join(folder, name), "w"), folder)
refused(lambda: open(json.__file__, "a"), "json")
refused(lambda: os.remove(json.__file__), "remove")
refused(lambda: open(sys.executable, "r+b"), "interpreter")
refused(lambda: os.rename(os.path.dirname(json.__file__), "/tmp/json"), "rename")
end()
