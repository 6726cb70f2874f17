"""The code inside the jail: the fork server, the supervisor of a run, and the code that starts the model's program.

Invariant: these modules import only the standard library and each other, because nothing else is in the jail. The host
mounts this folder read-only at `/opt/etude/guest` and starts it with the bare interpreter. The host's side shares its
settings, the message format and the size limits of a cell's answer.

Trust: the fork server and the supervisor are trusted and never run the model's code. The program's process is untrusted: the
model's code may do anything to it, and nothing it sends is trusted.
"""
