"""Everything that says "this would not train": checks of a configuration, of the machines that run it, and of a run.

`@check(stage)` registers a check. A command runs those of its stages: composing a configuration those of its options, a
start those of the files and packages on this machine (`nodes`: on each node of a cluster), then those of services, memory
and disk; `etude doctor` those of the machine; `etude check` and `etude env test` (`etude.testing`) all that can be tried.
"""
