"""The commands, one file each. A command imports what it needs when it runs, so that `etude --help` is instant."""
