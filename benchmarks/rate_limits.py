"""Calls per second that the rate limiter of shards allows, for several handles: `python -m benchmarks.rate_limits`.

Each handle is used by one thread. "writers" write and nothing waits; "both sides" has as many readers as writers, which
wait for each other in a narrow band. With `--pause` they do other work between two calls, as a write to a shard does.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import TYPE_CHECKING, Any

import ray as ray_package

from ostinato import RateLimiter
from ostinato.distributed.rate_limits import RateLimitClient, RateLimits

if TYPE_CHECKING:
    from ostinato.distributed.rate_limits import Kind

ray: Any = ray_package  # its stubs take no plain classes
ROWS = 16
"""Rows of a call."""


class Shard:
    """Stands for a shard that has rows."""

    def drawable(self) -> tuple[int, bool]:
        """Return many rows, which draws do not consume."""
        return 1_000_000, False


def start(limiter: RateLimiter) -> Any:
    """Start the limiter in an actor of its own."""
    shard = ray.remote(num_cpus=0)(Shard).remote()
    actor = ray.remote(num_cpus=0, max_concurrency=1 << 16)(RateLimits).remote(limiter, [shard])
    RateLimitClient(actor, limiter, lambda: None).acquire("write", 1, 60.0)
    return actor


def calls_per_s(actor: Any, limiter: RateLimiter, kinds: list[Kind], seconds: float, pause_s: float) -> float:
    """Return the calls per second of one handle and thread for each kind given."""
    counts, until = [0] * len(kinds), time.perf_counter() + seconds

    def run(number: int, kind: Kind) -> None:
        handle = RateLimitClient(actor, limiter, lambda: None)
        while time.perf_counter() < until:
            handle.acquire(kind, ROWS, 60.0)
            counts[number] += 1
            if pause_s:
                time.sleep(pause_s)

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(kinds)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    rate = sum(counts) / (time.perf_counter() - began)
    for thread in threads:
        thread.join(1.0)  # a call that waits for the other side is left behind
    return rate


def main() -> None:
    """Print the rates for 1, 8 and 32 handles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two calls of a handle")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    for handles in (1, 8, 32):
        wide = RateLimiter(min_size_to_sample=1)
        free = calls_per_s(start(wide), wide, ["write"] * handles, options.seconds, options.pause)
        narrow = RateLimiter(samples_per_insert=1, error_buffer=2 * ROWS * handles, min_size_to_sample=ROWS)
        kinds: list[Kind] = ["write", "draw"] * max(1, handles // 2)
        both = calls_per_s(start(narrow), narrow, kinds, options.seconds, options.pause)
        print(f"{handles:3d} handle(s): writers {free:8,.0f} calls/s; both sides {both:8,.0f} calls/s", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
