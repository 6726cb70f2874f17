"""Environments of other packages: each module has `open_environment(name, **args)`, which checks name and arguments and
returns what makes a session's `Environment`, and its class; and `names()`, those that the package has, if it can tell."""
