"""Live display, run report, trajectory inspection and the viewers. Reads events and files, never a trainer."""
