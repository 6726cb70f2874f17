"""Environments of other packages: each module has `open_environment(name, **args)`, which checks name and arguments and
returns a partial call that makes a session's `Environment` and, unless it is the package's, a version; and `names()`, if it
can tell."""
