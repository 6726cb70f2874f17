"""What people look at: the live display, a run's report, a trajectory explained. It reads events and files, never a
trainer."""
