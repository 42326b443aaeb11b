"""Buffers that serve other processes; each module needs what its name says, and is imported by its own name."""
