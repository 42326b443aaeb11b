"""Side-by-side speed measurements of Ostinato, its peers and the bare limits of the machine.

Run as ``python -m benchmarks`` from the root of the repository; see ``benchmarks/README.md``.
"""

from __future__ import annotations
