"""Buffers that are sent to another process are copied.

`multiprocessing` pickles tensors as torch tells it to: their memory would move to where both processes
write to it, through a descriptor for each tensor. A buffer in use has tensors that share memory, of which starting a
process makes "bad value(s) in fds_to_keep".
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["send_as_copies"]


def send_as_copies(*kinds: type) -> None:
    """Let `multiprocessing` send objects of exactly these classes as `pickle` writes them: by value."""
    for kind in kinds:
        ForkingPickler.register(kind, _by_value)


def _by_value(value: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return pickle.loads, (pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL),)
