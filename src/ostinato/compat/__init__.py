"""Doors for code written for other replay buffers: their names and manners outside, the engine inside.

Each module stands for itself and knows no other; `docs/compat/` lists where each differs from what it replaces.
"""
