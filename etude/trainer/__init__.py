"""The training loops, and the metrics, dumps and checkpoints that they write."""
