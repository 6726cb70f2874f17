"""Measurements beside public peers: what `benchmarks/run.py` runs, each part in a process of its own."""
