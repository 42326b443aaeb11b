"""Buffers beyond one process: in an actor of Ray, or sharded over many machines."""
