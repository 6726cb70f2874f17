"""The training loops, and the events, metrics, dumps and checkpoints that they write."""
