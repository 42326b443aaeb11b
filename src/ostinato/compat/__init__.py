"""Adapters: replay buffers with the API of other libraries, and the import of their checkpoints.

The modules do not import each other. `docs/compat/` lists the differences between each and its original.
"""
