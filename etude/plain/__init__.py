"""The plain trainer: a training step in float64, one row at a time, formula by formula, from given rollouts and weights.

Invariant: it imports nothing of what it checks, and not even what the rest of the package shares. Tests hold the trainer
against it, and `etude verify` holds a step of a finished run against it.
"""
