"""Pictures of the rows that units and slice samplers read, made from real buffers; `make pictures` runs it.

A ring of 16 slots, written 21 times: the oldest rows of episode 1 (terminated) have been overwritten, episode 2 was
truncated, episode 3 is running. Every row holds its own slot, so that a batch tells where it was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato import FrameStack, LazyTensorStorage, NStep, ReplayBuffer, Sampler, SequenceUnit, SliceSampler
from ostinato.protocols import Draw

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato import SampleUnit
    from ostinato.protocols import View

HERE = Path(__file__).parent
SLOTS, WRITTEN = 16, 21
LAST_OF_1, LAST_OF_2 = 8, 14
"""Last rows of the first two episodes; rows 16 to 20 are in the slots 0 to 4."""
GAMMA = 0.5


@dataclass(frozen=True)
class Read:
    """A row that is read: its slot, its kind, and its label."""

    slot: int
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Line:
    """One anchor: the rows that are read for it, the rows of the batch, and a note."""

    anchor: int | None
    reads: tuple[Read, ...] = ()
    chips: tuple[tuple[str, tuple[Read, ...]], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Block:
    """Lines under one title, which may be empty."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Scene:
    """One picture."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    legend: tuple[tuple[str, str], ...] = field(default=())


class Chosen(Sampler):
    """Draws given rows, and records which rows could be drawn."""

    def __init__(self, slots: list[int]) -> None:
        self.slots = torch.tensor(slots)
        self.allowed: list[int] = []

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:  # noqa: ARG002
        everywhere = torch.arange(view.rows)
        allowed = torch.ones(view.rows, dtype=torch.bool) if view.starts is None else view.starts.allowed(everywhere)
        self.allowed = everywhere[allowed].tolist()
        return Draw(self.slots)


def make_ring(sampler: Sampler, unit: SampleUnit | None = None) -> ReplayBuffer:
    """Write the three episodes. Rewards are one-hot, so a sum shows its terms."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(SLOTS),
        sampler=sampler,
        sample_unit=unit,
        generator=torch.Generator().manual_seed(0),
    )
    row = torch.arange(WRITTEN)
    slot = row % SLOTS
    rows = {
        "obs": slot.float() + 1,  # zeros mark missing frames
        "reward": torch.nn.functional.one_hot(slot, SLOTS).float(),
        "next_obs": 100 + slot.float(),
        "terminated": row == LAST_OF_1,
        "truncated": row == LAST_OF_2,
    }
    for start in range(0, WRITTEN, 3):
        rb.extend({name: value[start : start + 3] for name, value in rows.items()})
    return rb


def n_step() -> Scene:
    """Rewards in the sum, and the next observation that the target bootstraps from."""
    anchors = [5, 7, 11, 13, 15, 3]
    batch = make_ring(Chosen(anchors), NStep(3, GAMMA)).sample(len(anchors))
    lines = []
    for i, anchor in enumerate(anchors):
        weights, last, steps = batch["reward"][i], int(batch["next_obs"][i]) - 100, int(batch["steps_to_next_obs"][i])
        used = sorted(weights.nonzero().flatten().tolist(), key=lambda slot: -float(weights[slot]))
        power = {GAMMA**p: text for p, text in enumerate(("1", "γ", "γ²"))}
        reads = tuple(Read(slot, "learn", power[float(weights[slot])]) for slot in used)
        ended = bool(batch["terminated"][i])
        what = "terminated: no bootstrap" if ended else f"bootstraps from next_obs of {last}"
        if bool(batch["truncated"][i]):
            what = f"truncated: {what}"
        elif steps < 3 and not ended:
            what = f"newest row: {what}"
        lines.append(Line(anchor, (*reads, Read(last, "next")), (), f"k = {steps}, {what}"))
    title = "NStep(3, gamma): rewards in the sum, and where the return stops"
    return Scene(
        "nstep",
        title,
        (Block("", tuple(lines)),),
        (("learn", "reward, with its factor"), ("next", "end of the return")),
    )


def sequence() -> Scene:
    """Windows of two burn-in rows and four training rows, at the ends of episodes."""
    blocks = []
    words = {
        "pad": "the last row is repeated and masked",
        "stop": "the window moves back until it fits",
        "strict": "only rows followed by a whole window are drawn",
    }
    for boundary, word in words.items():
        lines = []
        sampler = Chosen([10])
        make_ring(sampler, SequenceUnit(4, boundary, burn_in=2)).sample(1)
        for anchor in [10, 7, 3] if boundary == "pad" else [7, 3]:  # in the middle all boundaries are the same
            if anchor not in sampler.allowed:
                lines.append(Line(anchor, note="never drawn"))
                continue
            rb = make_ring(Chosen([anchor]), SequenceUnit(4, boundary, burn_in=2))
            _, info = rb.sample(1, return_info=True)
            held = [
                Read(int(slot), "masked" if not valid else "learn" if learning else "burn", str(int(slot)))
                for slot, valid, learning in zip(
                    info["index"], info["validity_mask"], info["learning_mask"], strict=True
                )
            ]
            reads = tuple(Read(read.slot, read.kind) for read in held if read.kind != "masked")
            lines.append(Line(anchor, reads, (("", tuple(held)),)))
        blocks.append(Block(f"{boundary}: {word}", tuple(lines)))
    legend = (("burn", "burn-in"), ("learn", "trained on"), ("masked", "repeated, masked"))
    return Scene(
        "sequence", "SequenceUnit(4, boundary, burn_in=2): windows at the ends of episodes", tuple(blocks), legend
    )


def frame_stack() -> Scene:
    """Stacks of three frames, at the starts of episodes and in the middle."""
    blocks = []
    for padding, word, anchors in (
        ("repeat", "the first frame is repeated", [12, 10, 9, 5, 0]),
        ("zeros", "missing frames are zeros", [10, 9]),
    ):
        batch = make_ring(Chosen(anchors), FrameStack(3, ["obs"], padding=padding)).sample(len(anchors))
        lines = []
        for i, anchor in enumerate(anchors):
            stacks = tuple((name, _frames(batch[name][i])) for name in ("obs", "next_obs"))
            seen = {read.slot for read in stacks[0][1] if read.kind == "learn"}
            lines.append(Line(anchor, tuple(Read(slot, "learn") for slot in sorted(seen)), stacks))
        blocks.append(Block(f'padding="{padding}": {word}', tuple(lines)))
    legend = (("learn", "frame"), ("next", "next observation"), ("masked", "before the episode"))
    return Scene("framestack", 'FrameStack(3, ["obs"]): the frames of each stack, oldest first', tuple(blocks), legend)


def _frames(stack: Tensor) -> tuple[Read, ...]:
    out: list[Read] = []
    for i, value in enumerate(int(value) for value in stack):
        if value == 0:
            out.append(Read(-1, "masked", "0"))
        elif value >= 100:
            out.append(Read(value - 100, "next", f"{value - 100}'"))
        else:
            following = int(stack[i + 1]) if i + 1 < len(stack) else -1
            out.append(Read(value - 1, "masked" if following == value else "learn", str(value - 1)))
    return tuple(out)


def slices() -> Scene:
    """Possible first rows of slices, and their probabilities."""
    settings: list[tuple[str, dict[str, Any]]] = [
        ("SliceSampler(slice_len=4)", {"slice_len": 4}),
        ("SliceSampler(slice_len=5): episode 1 is too short", {"slice_len": 5}),
        (
            "SliceSampler(slice_len=5, strict_length=False): a shorter episode is drawn whole",
            {"slice_len": 5, "strict_length": False},
        ),
    ]
    blocks = []
    for title, options in settings:
        length, number = options["slice_len"], 20_000
        rb = make_ring(SliceSampler(**options))
        batch, info = rb.sample(number * length, return_info=True)
        slots = info["index"]
        last = info["next", "truncated"].flatten()
        first = torch.cat([torch.ones(1, dtype=torch.bool), last[:-1]])
        share = slots[first].bincount(minlength=SLOTS).double() / int(first.sum())
        starts = tuple(Read(slot, "start", f"1/{round(1 / p)}") for slot, p in enumerate(share.tolist()) if p)
        assert len(batch["obs"]) == len(slots)
        bounds = first.nonzero().flatten().tolist()
        example = next(at for at in bounds if int(slots[at]) == 15)
        held = tuple(Read(int(slots[at]), "learn", str(int(slots[at]))) for at in range(example, example + length))
        lines = [Line(None, starts, (), "possible first rows")]
        lines.append(Line(15, tuple(Read(read.slot, "learn") for read in held), (("", held),)))
        if "strict_length" in options:
            at = next(at for at in bounds if int(slots[at]) == 5)
            end = next(i for i in range(at, len(slots)) if last[i])
            short = tuple(Read(int(slots[i]), "learn", str(int(slots[i]))) for i in range(at, end + 1))
            lines.append(Line(5, tuple(Read(read.slot, "learn") for read in short), (("", short),)))
        blocks.append(Block(title, tuple(lines)))
    legend = (("start", "probability of a first row"), ("learn", "rows of one slice"))
    return Scene("slices", "SliceSampler: a uniform episode, then a uniform start within it", tuple(blocks), legend)


SCENES = (n_step, sequence, frame_stack, slices)


if __name__ == "__main__":
    from paint import paint

    for make in SCENES:
        paint(make(), HERE)
