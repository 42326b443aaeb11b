"""Paint the pictures of windows: the ring, and below it for each drawn row what is read and what the batch holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from card import BLUE, FAINT, GREEN, GRID, INK, LIGHT_BLUE, LIGHT_GREEN, LIGHT_ORANGE, LINE, ORANGE, Card

if TYPE_CHECKING:
    from pathlib import Path

    from windows import Block, Line, Read, Scene

EPISODES = {1: (BLUE, LIGHT_BLUE), 2: (ORANGE, LIGHT_ORANGE), 3: (GREEN, LIGHT_GREEN)}
"""Strong and light colour of each episode."""
EPISODE = [3] * 5 + [1] * 4 + [2] * 6 + [3]
"""Episode of each slot."""
LEFT, MARGIN, WIDTH = 2.5, 0.35, 18.8
RING, FIRST = 4.9, 6.3
"""Where the ring is, and the first line."""
LEGEND = 1.25


def paint(scene: Scene, folder: Path) -> Path:
    """Draw a scene to `folder`."""
    height = FIRST + sum(map(_height, scene.blocks)) + LEGEND * ((len(scene.legend) + 2) // 2) + 0.2
    card = Card(height, WIDTH)
    code, _, words = scene.title.partition(": ")
    card.text(MARGIN, 0.8, code, size=12.5, ha="left", fontweight="bold")
    card.text(MARGIN, 1.75, words, FAINT, ha="left")
    _ring(card)
    y = FIRST
    for block in scene.blocks:
        at = y
        if block.title:
            code, _, words = block.title.partition(": ")
            card.text(MARGIN, at + 0.35, code, ha="left", fontweight="bold")
            card.text(MARGIN, at + 1.25, words, FAINT, 10.5, ha="left")
            at += 1.95 if words else 1.05
        for line in block.lines:
            _line(card, line, at)
            at += _height_of_line(line)
        y += _height(block)
    _legend(card, scene, y)
    return card.save(folder / f"{scene.name}.png")


def _height(block: Block) -> float:
    head = 0.0 if not block.title else 2.45 if ": " in block.title else 1.55
    return head + sum(map(_height_of_line, block.lines))


def _height_of_line(line: Line) -> float:
    return 2.55 if line.chips or line.note else 1.25


def _ring(card: Card) -> None:
    for start, stop, episode, text in (
        (5, 9, 1, "1: terminated"),
        (9, 15, 2, "2: truncated"),
        (0, 5, 3, "3: running"),
        (15, 16, 3, "3"),
    ):
        strong = EPISODES[episode][0]
        card.text(LEFT + (start + stop) / 2, RING - 0.95, text, strong, 9.5)
        card.line([LEFT + start + 0.15, LEFT + stop - 0.15], [RING - 0.4] * 2, strong, 1.8)
    for slot, episode in enumerate(EPISODE):
        strong, light = EPISODES[episode]
        card.box(LEFT + slot, RING - 0.2, 1, 1, light, strong, f"{slot}", strong, size=10, bold=True)
    card.text(LEFT - 0.2, RING - 0.95, "episode", FAINT, 9.5, ha="right")
    card.text(LEFT - 0.2, RING + 0.3, "slot", FAINT, 9.5, ha="right")
    card.line([LEFT + 5] * 2, [RING - 1.75, RING + 0.95], INK, 1.8, zorder=6)
    card.text(LEFT + 4.8, RING - 1.85, "newest row: 4", size=9.5, ha="right")
    card.text(LEFT + 5.2, RING - 1.85, "write cursor, oldest row: 5", size=9.5, ha="left")


def _line(card: Card, line: Line, y: float) -> None:
    reads = {read.slot: read for read in line.reads if read.kind != "next"}
    for slot in range(16):
        if slot not in reads:
            card.box(LEFT + slot, y, 1, 1, "white", GRID, lw=0.9)
    for read in reads.values():
        _cell(card, LEFT + read.slot, y, read)
    for slot in (read.slot for read in line.reads if read.kind == "next"):
        card.arrow((LEFT + slot + 0.85, y + 0.5), (LEFT + slot + 1.5, y + 0.5))
    if line.anchor is None:
        card.text(LEFT, y + 1.5, line.note, FAINT, 10.5, ha="left")
        return
    card.text(LEFT - 0.2, y + 0.5, f"row {line.anchor}", size=10.5, ha="right")
    card.box(LEFT + line.anchor, y, 1, 1, "none", INK, lw=2.4)
    if line.note:
        card.text(LEFT, y + 1.5, line.note, FAINT, 10.5, ha="left")
    else:
        _batch(card, line, y + 1.2)


def _batch(card: Card, line: Line, y: float) -> None:
    x = LEFT
    for name, reads in line.chips:
        label = name or "batch"
        card.text(LEFT - 0.2 if x == LEFT else x + 2.0, y + 0.5, label, FAINT, 10, ha="right")
        x += 0.0 if x == LEFT else 2.2
        for read in reads:
            _cell(card, x, y, read)
            x += 1
        x += 1.2


def _cell(card: Card, x: float, y: float, read: Read) -> None:
    strong, light = EPISODES[EPISODE[read.slot]] if read.slot >= 0 else (FAINT, GRID)
    face = {"learn": strong, "burn": light, "start": light, "next": "white", "masked": "white"}[read.kind]
    edge = LINE if read.kind == "masked" else strong
    ink = {"learn": "white", "masked": FAINT}.get(read.kind, strong)
    size = 10 if len(read.text) < 3 else 9
    card.box(x, y, 1, 1, face, edge, read.text, ink, size=size, dashed=read.kind == "masked")


def _legend(card: Card, scene: Scene, y: float) -> None:
    drawn = "first row of the slice" if scene.name == "slices" else "drawn row"
    for i, (kind, text) in enumerate((*scene.legend, ("drawn", drawn))):
        x, at = MARGIN + (i % 2) * 9.2, y + LEGEND * (i // 2)
        if kind == "next" and scene.name == "nstep":
            card.arrow((x + 0.1, at + 0.5), (x + 0.95, at + 0.5))
        else:
            face = {"learn": FAINT, "burn": GRID, "start": GRID}.get(kind, "white")
            edge = INK if kind == "drawn" else LINE if kind == "masked" else FAINT
            card.box(x, at, 1, 1, face, edge, dashed=kind == "masked", lw=2.4 if kind == "drawn" else 1.2)
        card.text(x + 1.25, at + 0.5, text, FAINT, 10, ha="left")
