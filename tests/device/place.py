"""The device that the cases run on: the simulated one, or the GPU where `OSTINATO_DEVICE=cuda` says so."""

from __future__ import annotations

import contextlib
import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEVICE", "HostWaitError", "no_wait", "waits"]

DEVICE: torch.device
HostWaitError: type[RuntimeError]
no_wait: Any
waits: Any

if os.environ.get("OSTINATO_DEVICE") == "cuda":
    DEVICE = torch.device("cuda", 0)
    HostWaitError = RuntimeError

    @contextlib.contextmanager
    def _watch(mode: str) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    no_wait = partial(_watch, "error")

    @contextlib.contextmanager
    def waits() -> Iterator[list[warnings.WarningMessage]]:
        with warnings.catch_warnings(record=True) as seen, _watch("warn"):
            warnings.simplefilter("always")
            yield seen

else:
    from tests.device.backend import DEVICE, HostWaitError, no_wait, waits
