"""The live display, a run's report, a trajectory explained. Reads events and files, never a trainer."""
