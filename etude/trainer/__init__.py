"""The loops that train, and what a run shows and leaves behind."""
