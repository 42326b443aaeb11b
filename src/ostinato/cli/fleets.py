"""The command on sharded buffers that run in a Ray cluster."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato._optional import require
from ostinato.cli.output import answer, rendered
from ostinato.cli.reports import parts_of

if TYPE_CHECKING:
    from rich import console, live

    from ostinato import ShardedReplayBuffer
else:
    console, live = (require(f"rich.{name}", "cli") for name in ("console", "live"))

__all__ = ["FleetReport", "top"]


@dataclass(frozen=True)
class FleetReport:
    """State of a sharded buffer at one moment."""

    name: str
    rows: int
    """Rows in the shards that answer."""
    shards: list[dict[str, Any]]
    """The fields of each shard's `ShardReport`."""
    rate_limiter: str | None
    limiter_written: int | None
    """Rows written, as the limiter counts them; None without one."""
    limiter_drawn: int | None


def _report(buffer: ShardedReplayBuffer, name: str) -> FleetReport:
    shards = [one._asdict() for one in buffer.report()]
    limiter, counts = buffer.rate_limiter, buffer.limiter_counts
    written, drawn = (None, None) if counts is None else counts
    rows = sum(one["rows"] for one in shards)
    return FleetReport(name, rows, shards, None if limiter is None else str(limiter), written, drawn)


def top(name: str, namespace: str | None, address: str | None, *, interval_s: float, once: bool, as_json: bool) -> None:
    """Print the state of a sharded buffer, once or again and again.

    Raises:
        LostBufferError: There is no such buffer, or it has ended.
        UsageError: There is no cluster.
    """
    from ostinato import ShardedReplayBuffer

    quiet = {"log_to_driver": False, "logging_level": "error"}
    config = {**quiet, "address": address or "auto"}
    connected = require("ray", "ray").is_initialized()
    buffer = ShardedReplayBuffer.attach(name, namespace, ray_init_config=None if connected else config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the table says which shards are missing
        if once:
            answer(_report(buffer, name), as_json=as_json)
            return
        out = console.Console(highlight=False)
        with live.Live(console=out, auto_refresh=False) as view:
            while True:
                shown = console.Group(*rendered(parts_of(_report(buffer, name))))
                if out.is_terminal:
                    view.update(shown, refresh=True)
                else:
                    out.print(shown)
                time.sleep(interval_s)
