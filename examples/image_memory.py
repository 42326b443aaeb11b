"""How much memory frames take: four ways to store them, which all return the same batches.

An agent with stacked frames, as in Atari, stores two stacks of four 84x84 frames for each transition: 56 kB, of which
almost everything is there several times. The script plays a small ball game and writes its frames to four buffers:

- stacks: both stacks are stored as they are;
- `single_copy=True`: the next stack is stored once, as the stack of the following row;
- `FrameStack(4)` with `single_copy=True`: single frames are stored once, stacks are made when a batch is sampled;
- `FrameStack(4)` with `codec="auto"`: single frames, compressed without loss.

It compares the batches bit by bit, and ends with a table of bytes and times. Frames of this plain game compress
hundredfold; those of Atari games compress less.

    python examples/image_memory.py            # writes image_memory.png
    python examples/image_memory.py --quick    # a few seconds

Needs `pip install 'ostinato[viz,zstd]'`; without zstd, `codec="auto"` takes zlib.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ostinato import FrameStack, LazyTensorStorage, ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, STACK, EPISODE, BATCH = 84, 4, 200, 32
Rows = dict[str, Tensor]
T = TypeVar("T")


class Way(NamedTuple):
    """One way to store frames, and what it costs."""

    title: str
    buffer: ReplayBuffer
    single: bool
    """Whether it stores single frames."""
    write_s: list[float]
    sample_s: list[float]

    @property
    def row_bytes(self) -> float:
        """Bytes of the storage for each row."""
        return self.buffer.storage.nbytes / self.buffer.storage.max_size


def play(generator: torch.Generator) -> Tensor:
    """Return the frames of one episode, uint8 `[EPISODE + 1, 84, 84]`: a ball that bounces between walls, and a bat."""
    frames = torch.full((EPISODE + 1, SIZE, SIZE), 30, dtype=torch.uint8)
    frames[:, :3] = frames[:, :, :3] = frames[:, :, -3:] = 140
    frames[:, 10:22] = torch.arange(SIZE).div(7, rounding_mode="floor").mul(17).to(torch.uint8)
    ball = torch.randint(24, 60, (2,), generator=generator)
    speed = torch.randint(1, 4, (2,), generator=generator)
    for frame in frames:
        speed = torch.where((ball + speed < 22) | (ball + speed > SIZE - 8), -speed, speed)
        ball = ball + speed
        row, column = ball.tolist()
        frame[row : row + 4, column : column + 4] = 230
        frame[-5:-2, max(3, column - 6) : column + 10] = 200
    return frames


def stacked(frames: Tensor) -> Tensor:
    """Return the stack `[EPISODE + 1, 4, 84, 84]` that ends with each frame; the first frame is repeated before it."""
    return torch.cat([frames[:1].expand(STACK - 1, SIZE, SIZE), frames]).unfold(0, STACK, 1).permute(0, 3, 1, 2)


def rows_of(frames: Tensor) -> Rows:
    """Return the transitions of an episode with observations `[EPISODE + 1, ...]`."""
    ends = torch.zeros(EPISODE, dtype=torch.bool)
    ends[-1] = True
    return {"obs": frames[:-1], "next_obs": frames[1:], "action": torch.arange(EPISODE) % 3, "done": ends}


def make_ways(capacity: int, seed: int) -> list[Way]:
    """Return the four buffers; equal seeds draw equal rows."""

    def way(title: str, storage: LazyTensorStorage, *, single: bool) -> Way:
        unit = FrameStack(STACK, ["obs"]) if single else None
        generator = torch.Generator().manual_seed(seed)
        rb = ReplayBuffer(storage=storage, sample_unit=unit, batch_size=BATCH, generator=generator)
        return Way(title, rb, single, [], [])

    return [
        way("stacks", LazyTensorStorage(capacity), single=False),
        way("stacks, single_copy", LazyTensorStorage(capacity, single_copy=True), single=False),
        way("FrameStack, single_copy", LazyTensorStorage(capacity, single_copy=True), single=True),
        way("FrameStack, codec", LazyTensorStorage(capacity, codec="auto"), single=True),
    ]


def timed(call: Callable[[], T], times: list[float]) -> T:
    """Call a function, append its seconds to `times`, and return its result."""
    start = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - start)
    return result


def write(ways: list[Way], episodes: int, seed: int) -> None:
    """Write the same episodes to all buffers."""
    generator = torch.Generator().manual_seed(seed)
    for episode in range(1, episodes + 1):
        frames = play(generator)
        rows = {True: rows_of(frames), False: rows_of(stacked(frames))}
        for way in ways:
            timed(partial(way.buffer.extend, rows[way.single]), way.write_s)
        if episode % max(1, episodes // 5) == 0:
            sizes = ", ".join(f"{way.title} {way.buffer.storage.nbytes / 1e6:.1f} MB" for way in ways)
            print(f"{episode * EPISODE:6,} rows written, in memory: {sizes}", flush=True)


def compare(ways: list[Way], batches: int) -> None:
    """Sample the same batches from all buffers; raise if one differs."""
    for number in range(1, batches + 1):
        expected, *others = (timed(way.buffer.sample, way.sample_s) for way in ways)
        for way, batch in zip(ways[1:], others, strict=True):
            for name, column in expected.items():
                if not torch.equal(column, batch[name]):
                    msg = f"{way.title}: field {name} of batch {number} differs from that of plain stacks"
                    raise RuntimeError(msg)
        if number % max(1, batches // 4) == 0:
            print(f"{number:6,} batches of {BATCH}: equal from all buffers", flush=True)


def draw(path: Path, ways: list[Way]) -> None:
    """Plot bytes for each row, and times."""
    figure = Figure(figsize=(9.6, 2.8), layout="constrained")
    titles, panels = [way.title for way in ways], figure.subplots(1, 3, sharey=True)
    values = {
        "kB for each row": [way.row_bytes / 1e3 for way in ways],
        "ms to write 200 rows": [1e3 * median(way.write_s) for way in ways],
        f"ms to sample {BATCH}": [1e3 * median(way.sample_s) for way in ways],
    }
    for axes, (title, numbers), color in zip(panels, values.items(), ("#0072B2", "#B36B00", "#00795C"), strict=True):
        axes.bar_label(axes.barh(titles, numbers, color=color), fmt="%.3g", padding=3)
        axes.set(title=title, xlim=(0, 1.2 * max(numbers)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, write, compare, print a table and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_000, help="rows; 56 kB each in the buffer of stacks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the game and of the draws")
    parser.add_argument("--quick", action="store_true", help="two episodes and a few batches")
    parser.add_argument("--picture", type=Path, default=Path("image_memory.png"), help="where to write it")
    given = parser.parse_args(arguments)
    episodes, batches = (2, 4) if given.quick else (max(1, given.steps // EPISODE), 200)
    ways = make_ways(episodes * EPISODE, given.seed)
    write(ways, episodes, given.seed)
    compare(ways, batches)
    print(f"\n{'':24}{'bytes/row':>10}{'less':>8}{'write 200':>12}{f'sample {BATCH}':>12}")
    for way in ways:
        less, spent = ways[0].row_bytes / way.row_bytes, (1e3 * median(way.write_s), 1e3 * median(way.sample_s))
        print(f"{way.title:24}{way.row_bytes:10,.0f}{less:7.1f}x{spent[0]:9.2f} ms{spent[1]:9.2f} ms")
    draw(given.picture, ways)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
