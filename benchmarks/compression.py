"""Compressed image buffers beside raw ones: bytes per transition, and times of sample(32) and extend(32).

    python -m benchmarks.compression [--rows 2000] [--rounds 7] [--threads]

Frames are 84x84 grayscale, averaged from 210x160 pictures of a ball game, as the usual preprocessing of Atari games
does; `texture` adds a scrolling background with noise of the kind that a real game has at worst, `noise` is random.
Storages are measured in rotating order; times are medians, relative to the raw storage of the same rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import adaptive_avg_pool2d

from ostinato import Episodes, FrameStack, LazyTensorStorage, ReplayBuffer, ZlibCodec, ZstdCodec
from ostinato.durable.codecs import has_zstd, map_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

STACK = 4
EPISODE = 500


def game(steps: int, content: str, seed: int = 0) -> torch.Tensor:
    """Return frames of one player and one ball, uint8 `[steps, 84, 84]`."""
    generator = torch.Generator().manual_seed(seed)
    if content == "noise":
        return torch.randint(0, 256, (steps, 84, 84), dtype=torch.uint8, generator=generator)
    ground = torch.randint(60, 200, (26, 1000), generator=generator).float()
    ground = ground.repeat_interleave(8, 0).repeat_interleave(4, 1)
    bricks = torch.randint(80, 230, (6, 16), generator=generator).float()
    alive = torch.ones(6, 16, dtype=torch.bool)
    frames = torch.empty(steps, 84, 84, dtype=torch.uint8)
    ball, speed, paddle = torch.tensor([120.0, 80.0]), torch.tensor([2.7, 1.9]), 70.0
    for step in range(steps):
        picture = torch.zeros(210, 160)
        if content == "texture":
            left = 3 * step % 3000
            picture[:208] = ground[:, left : left + 160] + 6 * torch.randn(208, 160, generator=generator)
        picture[:17], picture[:, :8], picture[:, 152:] = 142, 142, 142
        wall = torch.where(alive, bricks, picture[57, 80])
        picture[57:93, 8:152] = wall.repeat_interleave(6, 0).repeat_interleave(9, 1)
        ball += speed
        for axis, (low, high) in enumerate(((18.0, 188.0), (9.0, 148.0))):
            if not low < float(ball[axis]) < high:
                speed[axis] = -speed[axis]
                ball[axis] = ball[axis].clamp(low, high)
        y, x = int(ball[0]), int(ball[1])
        if 57 <= y < 93:
            alive[(y - 57) // 6, min(15, (x - 8) // 9)] = False
        paddle += (float(ball[1]) - 8 - paddle) * 0.2
        picture[y : y + 4, x : x + 2] = 200
        picture[189:193, int(paddle) : int(paddle) + 16] = 200
        if step % EPISODE == EPISODE - 1:
            alive[:] = True
        frames[step] = adaptive_avg_pool2d(picture[None], 84)[0].clamp(0, 255).to(torch.uint8)
    return frames


class Way(NamedTuple):
    """One way to store the same transitions."""

    name: str
    stacked: bool
    """Whether a row holds stacks of frames, for observation and next observation; else one frame."""
    options: dict[str, Any]


def ways() -> list[Way]:
    """Return all ways, the raw ones first."""
    codecs: dict[str, Any] = {"zlib, level 1": ZlibCodec(1), "zlib, level 6": ZlibCodec(6)}
    if has_zstd():
        codecs |= {"zstd, level 1": ZstdCodec(1), "zstd, level 3": ZstdCodec(3)}
    stacks = [Way("84x84x4, raw", stacked=True, options={})]
    stacks += [Way(f"84x84x4, {name}", stacked=True, options={"codec": codec}) for name, codec in codecs.items()]
    best = "zstd, level 3" if has_zstd() else "zlib, level 1"
    frames = [
        Way("single frames and `FrameStack(4)`, raw", stacked=False, options={}),
        Way(f"single frames and `FrameStack(4)`, {best}", stacked=False, options={"codec": codecs[best]}),
    ]
    return stacks + frames


def transitions(frames: torch.Tensor, *, stacked: bool) -> dict[str, torch.Tensor]:
    """Return transitions of the frames; both ways hold the same ones."""
    steps = frames.shape[0] - STACK
    rest = {
        "action": torch.arange(steps) % 6,
        "reward": torch.zeros(steps),
        "done": torch.zeros(steps, dtype=torch.bool),
    }
    if not stacked:
        return {"obs": frames[STACK - 1 : -1], "next_obs": frames[STACK:], **rest}
    stacks = frames.unfold(0, STACK, 1).contiguous()
    return {"obs": stacks[:-1], "next_obs": stacks[1:], **rest}


def buffer(way: Way, data: dict[str, torch.Tensor]) -> ReplayBuffer:
    unit = None if way.stacked else FrameStack(STACK, ["obs", "next_obs"])
    episodes = None if way.stacked else Episodes(end_key="done")
    storage = LazyTensorStorage(len(data["action"]), **way.options)
    rb = ReplayBuffer(storage=storage, sample_unit=unit, episodes=episodes, batch_size=32)
    for start in range(0, len(data["action"]), 32):
        rb.extend({key: value[start : start + 32] for key, value in data.items()})
    return rb


def seconds(call: Callable[[], object], at_least_s: float = 0.1) -> float:
    """Return the time of one call."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < at_least_s:
        call()
        count += 1
    return passed / count


def compare(content: str, rows: int, rounds: int) -> Table:
    """Measure all ways with one kind of content."""
    frames, chosen = game(rows + STACK, content), ways()
    data = [transitions(frames, stacked=way.stacked) for way in chosen]
    buffers = [buffer(way, part) for way, part in zip(chosen, data, strict=True)]
    chunks = [{key: value[:32] for key, value in part.items()} for part in data]
    times: list[dict[str, list[float]]] = [{"sample": [], "extend": []} for _ in chosen]
    for number in range(rounds):
        for i in range(len(chosen)):
            at = (i + number) % len(chosen)
            rb, chunk = buffers[at], chunks[at]
            times[at]["sample"].append(seconds(rb.sample))
            times[at]["extend"].append(seconds(lambda rb=rb, chunk=chunk: rb.extend(chunk)))  # type: ignore[misc]
    median = [{key: statistics.median(found) for key, found in way.items()} for way in times]
    table = Table("storage", "bytes per transition", "sample(32)", "extend(32)", title=content)
    for way, rb, found in zip(chosen, buffers, median, strict=True):
        ratios = [f"{found[key] / median[0][key]:.2f}x ({1e6 * found[key]:.0f} us)" for key in ("sample", "extend")]
        table.add_row(way.name, f"{rb.storage.nbytes / rows:,.0f}", *ratios)
    return table


def threads() -> Table:
    """Measure how much threads save, by the size of a batch."""
    codecs: list[Any] = [ZlibCodec(1), *([ZstdCodec(3)] if has_zstd() else [])]
    table = Table("codec", "rows of 28 kB", "decompression, one thread", "several threads", title="threads")
    stacks = game(260, "texture").unfold(0, STACK, 1)[:256].contiguous()
    for codec in codecs:
        blobs = [codec.encode(stack.numpy().tobytes()) for stack in stacks]
        size = stacks[0].nbytes

        def decode(part: Any, codec: Any = codec, size: int = size) -> list[Any]:
            return [codec.decode(blob, size) for blob in part]

        for count in (32, 64, 128, 256):
            part = blobs[:count]
            one = statistics.median(seconds(lambda part=part: decode(part)) for _ in range(5))  # type: ignore[misc]
            all_of = lambda part=part, count=count: map_in_threads(decode, part, count << 20)  # noqa: E731
            several = statistics.median(seconds(all_of) for _ in range(5))
            table.add_row(codec.name, str(count), f"{1e6 * one:.0f} us", f"{several / one:.2f}x")
    return table


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2000, help="transitions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", action="store_true", help="measure the threads instead")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.threads:
        console.print(threads())
        return 0
    for content in ("game", "texture", "noise"):
        console.print(compare(content, options.rows, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
