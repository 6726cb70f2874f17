# Keeps memory in access lists and attributes of files, which neither a process nor the size of the files counts.
import os

entry = lambda tag, identity=0xFFFFFFFF: b"".join(
    part.to_bytes(size, "little") for part, size in ((tag, 2), (7, 2), (identity, 4))
)
rights = (2).to_bytes(4, "little") + entry(1) + entry(2, os.getuid()) * 8180 + entry(4) + entry(16) + entry(32)
os.mkdir("/tmp/folder")
for name in ("system.posix_acl_access", "system.posix_acl_default"):
    refused(lambda: os.setxattr("/tmp/folder", name, rights), name)
refused(lambda: os.setxattr("/tmp/folder", "user.x", b"x"), "an attribute")
folder = os.open("/tmp/folder", os.O_RDONLY)
refused(lambda: os.setxattr(folder, "user.x", b"x"), "an attribute of a descriptor")
end()
