"""The `etude` commands, one file each. Commands import their dependencies lazily, so that `etude --help` is instant."""
