"""The code inside the jail: the fork server, the supervisor of a run, and what turns a process into the program.

Invariant: these modules import nothing but the standard library and each other, because in the jail there is nothing
else. The host mounts this folder read-only at `/opt/etude/guest` and starts it with the bare interpreter. With the host's
side it shares settings, the message format and the bounds of a cell's answer.

Trust: fork server and supervisor are ours and never run the model's code. The program is the model's from its first line
on: it may do anything to its own process, and nothing it sends is trusted.
"""
