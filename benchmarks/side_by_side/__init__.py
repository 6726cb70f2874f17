"""Measurements against public peers: what `benchmarks/run.py` runs, each part in a separate process."""
