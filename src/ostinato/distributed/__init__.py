"""Buffers that serve other processes: in an actor of Ray, sharded over many of them, or behind torch's RPC."""
