"""Checkpoints of a buffer: its state, saving it, loading it."""
