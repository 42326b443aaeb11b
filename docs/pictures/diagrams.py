"""Diagrams of the ring, of windows and of storages, filled from real buffers; `make pictures` runs it."""

from __future__ import annotations

from math import cos, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from card import BLUE, FAINT, GREEN, INK, LIGHT_BLUE, LIGHT_GREEN, LIGHT_ORANGE, LINE, ORANGE, Card
from matplotlib.patches import Wedge

from ostinato import LazyTensorStorage, NStep, PrioritizedSampler, ReplayBuffer, RoundRobinWriter, SequenceUnit

if TYPE_CHECKING:
    from ostinato import SampleUnit

HERE = Path(__file__).parent


def ring() -> Card:
    """A ring of eight slots after eleven writes."""
    rb = ReplayBuffer(storage=LazyTensorStorage(8), writer=RoundRobinWriter(track_generations=True))
    for row in range(11):
        rb.add({"row": row})
    rows, generations = rb["row"].tolist(), rb.writer.generations_of(torch.arange(8)).tolist()
    cursor = rb.cursor
    card = Card(8.0)
    middle, radius = (3.7, 4.0), 2.7
    card.axes.set_aspect("equal")
    for slot in range(8):
        new = rows[slot] >= 8
        start = 270 + 45 * slot  # y points downwards, so slots run clockwise from the top
        card.axes.add_patch(
            Wedge(middle, radius, start + 1.2, start + 43.8, width=1.25,
                  facecolor=LIGHT_ORANGE if new else LIGHT_BLUE, edgecolor=ORANGE if new else BLUE, lw=1.4)
        )  # fmt: skip
        angle = (start + 22.5) * pi / 180
        at = [(middle[0] + r * cos(angle), middle[1] + r * sin(angle)) for r in (2.08, 3.05)]
        card.text(*at[0], f"{rows[slot]}", ORANGE if new else BLUE, 14, fontweight="bold")
        card.text(*at[1], f"{slot}", FAINT, 10.5)
    angle = (270 + 45 * cursor) * pi / 180
    card.arrow(
        (middle[0] + 0.15 * cos(angle), middle[1] + 0.15 * sin(angle)),
        (middle[0] + 1.42 * cos(angle), middle[1] + 1.42 * sin(angle)), lw=2.4,
    )  # fmt: skip
    card.text(middle[0] - 0.1, middle[1] - 0.45, "cursor", size=11)
    x = 7.7
    card.text(x, 0.85, "slots in memory", INK, ha="left", fontweight="bold")
    for slot in range(8):
        new = rows[slot] >= 8
        face, ink = (LIGHT_ORANGE, ORANGE) if new else (LIGHT_BLUE, BLUE)
        card.text(x + slot + 0.5, 1.65, f"{slot}", FAINT, 10.5)
        card.box(x + slot, 2.0, 1, 1.05, face, ink, f"{rows[slot]}", ink, size=13, bold=True)
        card.text(x + slot + 0.5, 3.4, f"{generations[slot]}", INK, 10.5)
    card.arrow((x + cursor + 0.5, 4.7), (x + cursor + 0.5, 3.8), lw=2.4)
    card.text(x + cursor + 0.5, 5.0, "cursor", size=11)
    card.text(x, 4.05, "generations", FAINT, 10.5, ha="left")
    words = "Rows 8, 9 and 10 replaced 0, 1 and 2.\n"
    words += f"The next row replaces row {rows[cursor]},\nthe oldest, in slot {cursor}."
    card.text(x, 6.45, words, INK, 11, ha="left", linespacing=1.5)
    return card


def episodes(unit: SampleUnit | None = None) -> ReplayBuffer:
    """The three episodes of step 4 of the tutorial: terminated, truncated, running."""
    rb = ReplayBuffer(storage=LazyTensorStorage(14), sample_unit=unit)
    episode = torch.tensor([0] * 6 + [1] * 3 + [2] * 5)
    step = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4])
    rb.extend(
        {
            "episode": episode,
            "step": step,
            "reward": torch.ones(14),
            "next_obs": step + 1.0,
            "terminated": (episode == 0) & (step == 5),
            "truncated": (episode == 1) & (step == 2),
        }
    )
    return rb


COLORS = [(BLUE, LIGHT_BLUE), (ORANGE, LIGHT_ORANGE), (GREEN, LIGHT_GREEN)]


def at_starts(rb: ReplayBuffer, starts: list[int]) -> tuple[Any, Any]:
    """Batch and info of samples that begin at the given rows."""
    seen: dict[int, tuple[Any, Any]] = {}
    while not seen.keys() >= set(starts):
        batch, info = rb.sample(1, return_info=True)
        seen.setdefault(int(info["anchor_index"][0] if "anchor_index" in info else info["index"][0]), (batch, info))
    return [seen[start][0] for start in starts], [seen[start][1] for start in starts]


def windows() -> Card:
    """Windows of four steps: in an episode, at its end, and the one that is never made."""
    card, x = Card(9.2), 1.0
    starts = [1, 4, 7]
    _, infos = at_starts(episodes(SequenceUnit(4)), starts)
    strip(card, x, 1.3)
    for line, (start, info) in enumerate(zip(starts, infos, strict=True)):
        y = 3.2 + 1.5 * line
        color = COLORS[0 if start < 6 else 1]
        for at, (slot, valid) in enumerate(zip(info["index"].tolist(), info["validity_mask"].tolist(), strict=True)):
            face, edge, ink = (color[0], color[0], "white") if valid else ("white", LINE, FAINT)
            card.box(x + start + at, y, 1, 1, face, edge, f"{slot}", ink, dashed=not valid, size=12, bold=valid)
        words = "in an episode" if bool(info["validity_mask"].all()) else "padded, masked"
        card.text(x + start + 4.25, y + 0.5, words, FAINT, 10.5, ha="left")
    y = 7.7
    for at in range(4):
        slot = 8 + at
        card.box(x + slot, y, 1, 1, "white", COLORS[1 if slot < 9 else 2][0], f"{slot}", LINE, size=12)
    card.line([x + 7.9, x + 12.1], [y + 0.5, y + 0.5], INK, 1.8, zorder=4)
    card.text(x + 7.7, y + 0.5, "never made: two episodes", FAINT, 10.5, ha="right")
    return card


def strip(card: Card, x: float, y: float) -> None:
    """The rows of the three episodes, in the order of their slots."""
    for start, stop, words, (strong, light) in (
        (0, 6, "terminated", COLORS[0]),
        (6, 9, "truncated", COLORS[1]),
        (9, 14, "running", COLORS[2]),
    ):
        card.text(x + (start + stop) / 2, y - 0.55, words, strong, 11, fontweight="bold")
        for slot in range(start, stop):
            card.box(x + slot, y, 1, 1, light, strong, f"{slot}", strong, size=12)


def n_step_truncation() -> Card:
    """3-step returns in an episode, at a termination and at a truncation."""
    batches, _ = at_starts(episodes(NStep(3, 0.9)), [1, 4, 7])
    card = Card(11.4)
    cases = (
        ("in an episode", "R = r₁ + γ r₂ + γ² r₃ + γ³ V(s₄)", 1, COLORS[0]),
        ("terminated", "R = r₁ + γ r₂", 4, COLORS[0]),
        ("truncated", "R = r₁ + γ r₂ + γ² V(s₃)", 7, COLORS[1]),
    )
    for line, ((title, formula, _, (strong, light)), batch) in enumerate(zip(cases, batches, strict=True)):
        y = 0.75 + 3.65 * line
        steps, ended = int(batch["steps_to_next_obs"][0]), bool(batch["terminated"][0])
        card.text(0.6, y, title, INK, 12, ha="left", fontweight="bold")
        card.text(15.4, y, formula, INK, 12, ha="right")
        for at in range(4):
            x, used = 0.6 + 4.0 * at, at < steps
            if at > steps:
                card.box(x, y + 0.85, 1.5, 1.3, "white", LINE, f"s'{'₀₁'[at - steps - 1]}", LINE, dashed=True, size=13)
                continue
            last = at == steps
            face = "white" if used or ended else strong
            face, ink = (light, strong) if used else (face, "white" if not ended else LINE)
            card.box(x, y + 0.85, 1.5, 1.3, face, strong if used or not ended else LINE, f"s{'₁₂₃₄'[at]}", ink, size=13,
                     bold=last and not ended, dashed=last and ended)  # fmt: skip
            if used:
                card.arrow((x + 1.6, y + 1.5), (x + 3.9, y + 1.5), strong)
                card.text(x + 2.7, y + 1.05, f"r{'₁₂₃'[at]}", strong, 12)
            else:
                words = "no bootstrap" if ended else "bootstrap" if steps == 3 else "final observation"
                card.text(x + 0.75, y + 2.6, words, INK if not ended else FAINT, 10.5)
            if at == steps and steps < 3:
                card.line([x + 2.75] * 2, [y + 0.75, y + 2.25], INK, 1.6)
        if steps < 3:
            card.text(13.35, y + 2.6, "next episode", FAINT, 10.5)
    return card


def single_copy() -> Card:
    """Two episodes of four steps, with and without `single_copy`, and the bytes of 1,000 rows of images."""
    card = Card(11.6)
    sizes = [image_buffer(single_copy=single).storage.nbytes for single in (False, True)]
    letters = [("a", COLORS[0]), ("b", COLORS[1])]
    for block, (y, title) in enumerate(((0.7, "stored twice"), (6.5, "single_copy=True"))):
        card.text(0.5, y, title, INK, 12, ha="left", fontweight="bold")
        card.text(15.5, y, f"{sizes[block] / 1e6:.1f} MB", INK, 12, ha="right")
        for line, name in enumerate(("obs", "next_obs")):
            at = y + 0.75 + 1.25 * line
            card.text(3.0, at + 0.5, name, FAINT, 11, ha="right")
            for row in range(8):
                letter, (strong, light) = letters[row // 4]
                step = row % 4 + line
                x = 3.4 + 1.5 * row
                last = line == 1 and step == 4
                face = strong if last else light
                kept = line == 0 or block == 0
                card.box(x, at, 1.42, 1, face if kept else "white", strong if kept else LINE,
                         f"{letter}{step}" if kept else "", "white" if last else strong, size=12, bold=last,
                         dashed=not kept)  # fmt: skip
                if not kept and not last:
                    card.arrow((x + 0.7, at + 0.55), (x + 1.75, at - 0.2), LINE, lw=1.2)
                elif not kept:
                    card.arrow((x + 0.7, at + 0.55), (x + 0.7, at + 1.65), strong, lw=1.6)
                    card.box(x, at + 1.65, 1.42, 1, strong, strong, f"{letter}{step}", "white", size=12, bold=True)
        if block:
            card.text(3.0, y + 4.15, "side table", FAINT, 11, ha="right")
        else:
            card.text(3.4, y + 3.85, "dark: final observations, which are in no other row", FAINT, 10.5, ha="left")
    return card


def image_buffer(*, single_copy: bool) -> ReplayBuffer:
    """1,000 rows of 84 x 84 x 4 bytes, in ten episodes."""
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000, single_copy=single_copy))
    for episode in range(10):
        frames = torch.arange(101).add(episode).view(-1, 1, 1, 1).expand(101, 84, 84, 4).to(torch.uint8)
        rb.extend({"obs": frames[:-1], "next_obs": frames[1:]})
    return rb


MASSES = ([4.0, 1.0, 2.0, 1.0], [1.0, 1.0, 6.0, 4.0], [2.0, 1.0, 1.0, 1.0])
"""Values of the rows of three shards."""


def shards() -> Card:
    """Three shards, the probability of each, and a batch."""
    card = Card(11.2)
    total = sum(map(sum, MASSES))
    for shard, values in enumerate(MASSES):
        strong, light = COLORS[shard]
        x = 0.5 + 5.1 * shard
        rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 1.0, 0.0, eps=0.0))
        rb.update_priority(rb.extend({"row": torch.arange(4)}), torch.tensor(values))
        mass = float((rb.sampler.priorities[:4]).sum())
        card.box(x + 1.05, 0.4, 2.7, 1.0, "white", LINE, f"worker {shard}", INK, size=11)
        card.arrow((x + 2.4, 1.45), (x + 2.4, 2.35), FAINT)
        card.box(x, 2.4, 4.8, 4.3, "white", strong)
        card.text(x + 2.4, 3.0, f"shard {shard}", strong, 12, fontweight="bold")
        for row, value in enumerate(values):
            tall = 0.3 * value
            card.axes.bar(x + 0.95 + 0.97 * row, -tall, 0.72, 5.6, color=light, edgecolor=strong, lw=1.2, zorder=3)
            card.text(x + 0.95 + 0.97 * row, 5.6 - tall - 0.3, f"{value:g}", strong, 10.5)
        card.text(x + 2.4, 6.15, f"mass {mass:g}", INK, 11)
        card.arrow((x + 2.4, 6.75), (3.3 + 4.7 * shard, 8.55), strong, lw=1 + 5 * mass / total)
        card.text(x + 2.4 + (1.5, 1.3, -1.3)[shard], 7.55, f"P = {mass:g}/{total:g}", strong, 11)
    card.box(1.4, 8.6, 13.2, 1.1, "white", INK, lw=1.6)
    for at, shard in enumerate([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]):
        strong = COLORS[shard][0]
        card.box(1.6 + 1.067 * at, 8.72, 1.06, 0.86, strong, strong)
    card.text(8, 10.35, "a batch: P(row) = P(shard) · value / mass = value / 25", INK, 11)
    return card


def flow() -> Card:
    """The ways of the data: write, read, learn."""
    card = Card(9.2)
    card.box(0.4, 1.4, 3.3, 1.7, LIGHT_ORANGE, ORANGE, "environment", ORANGE, bold=True)
    card.box(12.3, 5.0, 3.3, 1.9, LIGHT_GREEN, GREEN, "learner", GREEN, bold=True)
    card.box(4.8, 0.4, 6.4, 7.2, "white", BLUE, lw=1.8)
    card.text(8, 0.95, "replay buffer", BLUE, 11.5, fontweight="bold")
    card.box(5.2, 1.65, 5.6, 1.2, LIGHT_BLUE, BLUE, "writer: which slot", BLUE)
    card.box(5.2, 5.75, 5.6, 1.2, LIGHT_BLUE, BLUE, "sampler: which rows", BLUE)
    card.text(8, 3.35, "storage", BLUE, 11)
    for slot in range(8):
        face = {2: ORANGE, 4: BLUE, 7: BLUE}.get(slot, "white")
        card.box(5.2 + 0.7 * slot, 3.75, 0.7, 0.95, face, ORANGE if slot == 2 else BLUE)
    card.arrow((5.2 + 0.7 * 2.5, 2.9), (5.2 + 0.7 * 2.5, 3.7), ORANGE, lw=2)
    for slot in (4, 7):
        card.arrow((5.2 + 0.7 * (slot + 0.5), 5.7), (5.2 + 0.7 * (slot + 0.5), 4.75), BLUE, lw=2)
    card.arrow((3.75, 2.25), (5.15, 2.25), ORANGE, lw=2.4)
    card.text(2.05, 0.85, "1 write rows", ORANGE)
    card.arrow((10.85, 4.22), (13.95, 4.95), BLUE, bend=-0.35, lw=2.4)
    card.text(13.6, 3.35, "2 read a batch", BLUE)
    card.arrow((12.25, 6.35), (10.85, 6.35), GREEN, lw=2.4)
    card.text(13.2, 7.4, "3 priorities", GREEN)
    card.line([15.2, 15.2, 2.05], [6.95, 8.6, 8.6], FAINT, 1.6)
    card.arrow((2.05, 8.6), (2.05, 3.2), FAINT)
    card.text(3.2, 8.15, "policy", FAINT)
    return card


def checkpoint() -> Card:
    """A directory after two saves and in the middle of a third one."""
    card = Card(9.6)
    saves = (("save 1", ["base"]), ("save 2", ["base", "patch"]), ("save 3, killed", ["base", "patch", "half"]))
    for at, (title, files) in enumerate(saves):
        x = 0.4 + 5.2 * at
        card.text(x + 2.4, 0.7, title, INK, 12, fontweight="bold")
        card.box(x, 1.3, 4.8, 1.2, LIGHT_GREEN, GREEN, "manifest.json", GREEN, bold=True)
        for line, kind in enumerate(files):
            y = 3.5 + 1.6 * line
            words = {"base": "rows: 50,000", "patch": "patch: 100 rows", "half": "half a patch"}[kind]
            whole = kind != "half"
            card.box(x + 0.9, y, 3.9, 1.15, LIGHT_BLUE if whole else "white", BLUE if whole else LINE, words,
                     BLUE if whole else FAINT, dashed=not whole, size=10.5)  # fmt: skip
            if whole:
                card.line([x + 0.4, x + 0.4], [2.5, y + 0.58], GREEN, 1.6)
                card.arrow((x + 0.4, y + 0.58), (x + 0.88, y + 0.58), GREEN)
    card.text(8, 9.0, "A load reads what the manifest names; the manifest is replaced last.", INK, 11)
    return card


DIAGRAMS = {
    "ring": ring,
    "windows": windows,
    "nstep-truncation": n_step_truncation,
    "single-copy": single_copy,
    "shards": shards,
    "flow": flow,
    "checkpoint": checkpoint,
}


if __name__ == "__main__":
    for name, make in DIAGRAMS.items():
        make().save(HERE / f"{name}.png")
