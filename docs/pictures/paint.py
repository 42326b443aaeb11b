"""Paint the pictures of windows with matplotlib: the ring, and below it one line of cells per anchor."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

    from windows import Line, Scene

INK, FAINT, GRID = "#1F2933", "#52606D", "#E4E7EB"
EPISODES = {1: ("#0072B2", "#DCEBF5"), 2: ("#B36B00", "#FBEBD0"), 3: ("#00795C", "#D6EFE6")}
"""Strong and light colour of each episode."""
EPISODE = [3] * 5 + [1] * 4 + [2] * 6 + [3]
"""Episode of each slot."""
CHIPS_AT = 17.0


def paint(scene: Scene, folder: Path) -> Path:
    """Draw a scene to `folder`."""
    count = sum(len(block.lines) + 1.35 * _headline(scene, i) for i, block in enumerate(scene.blocks))
    height = 0.325 * (count + 6.0)
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 8.5, "text.color": INK}):
        figure = Figure(figsize=(9.6, height), dpi=130, facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        top = 4.6
        axes.set_xlim(-2.6, 27.0)
        axes.set_ylim(-count - (1.4 if _headline(scene, 0) else 1.9), top)
        axes.text(-2.1, top - 0.75, scene.title, fontsize=11.5, fontweight="bold", va="center")
        _ring(axes)
        axes.text(CHIPS_AT, 0.85, "the batch", va="center", color=FAINT)
        at = -0.75
        for i, block in enumerate(scene.blocks):
            if _headline(scene, i):
                axes.text(-2.1, at, block.title, color=INK, fontweight="bold", va="center", fontsize=8.5)
                at -= 0.95
            for line in block.lines:
                _line(axes, line, at)
                at -= 1.0
            at -= 0.4 * _headline(scene, i)
        _legend(axes, scene, -count - (0.75 if _headline(scene, 0) else 1.2))
        return save(figure, folder / f"{scene.name}.png")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG with a palette of 64 colours, a fifth of the size of one without."""
    drawn = BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def _headline(scene: Scene, number: int) -> bool:
    return len(scene.blocks) > 1 or scene.blocks[number].title != "anchor"


def _ring(axes: Any) -> None:
    for slot in range(16):
        strong, light = EPISODES[EPISODE[slot]]
        _cell(axes, slot, 0.85, light, strong, 0.8)
        axes.text(slot + 0.5, 0.85, str(slot), ha="center", va="center", color=strong, fontweight="bold")
    axes.text(-0.25, 0.85, "slot", ha="right", va="center", color=FAINT)
    for start, stop, episode, text in (
        (5, 9, 1, "1: terminated"),
        (9, 15, 2, "2: truncated"),
        (0, 5, 3, "3: running"),
        (15, 16, 3, "3"),
    ):
        strong = EPISODES[episode][0]
        axes.plot([start + 0.12, stop - 0.12], [1.55, 1.55], color=strong, lw=1.6, solid_capstyle="round")
        axes.text((start + stop) / 2, 1.92, text, ha="center", va="center", color=strong, fontsize=8)
    axes.text(-0.25, 1.92, "episode", ha="right", va="center", color=FAINT)
    axes.plot([5, 5], [0.3, 2.55], color=INK, lw=1.4)
    axes.annotate(
        "write cursor: the newest row is 4, the oldest is 5",
        (5, 2.55),
        (5.15, 2.68),
        va="center",
        color=INK,
        fontsize=8,
    )


def _line(axes: Any, line: Line, at: float) -> None:
    kinds = {read.slot: read for read in line.reads if read.kind != "next"}
    nexts = {read.slot for read in line.reads if read.kind == "next"}
    for slot in range(16):
        strong, light = EPISODES[EPISODE[slot]]
        read = kinds.get(slot)
        if read is None:
            _cell(axes, slot, at, "white", GRID, 0.7)
            continue
        if read.kind == "start":
            _cell(axes, slot, at, light, strong, 0.8)
            axes.text(slot + 0.5, at, read.text, ha="center", va="center", color=strong, fontsize=7.5)
            continue
        _cell(axes, slot, at, light if read.kind == "burn" else strong, strong, 0.8)
        if read.text:
            axes.text(slot + 0.5, at, read.text, ha="center", va="center", color="white", fontsize=8.5)
    for slot in nexts:
        strong = EPISODES[EPISODE[slot]][0]
        axes.annotate(
            "", (slot + 1.32, at), (slot + 0.9, at), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2}
        )
    if line.anchor is not None:
        axes.text(-0.25, at, f"row {line.anchor}", ha="right", va="center", color=INK)
        axes.add_patch(_box(line.anchor, at, "none", INK, 1.7))
    _chips(axes, line, at)


def _chips(axes: Any, line: Line, at: float) -> None:
    x = CHIPS_AT
    for name, reads in line.chips:
        if name:
            width = 1.15 if name == "obs" else 2.0
            axes.text(x + width - 0.15, at, name, ha="right", va="center", color=FAINT, fontsize=8)
            x += width
        for read in reads:
            strong, light = EPISODES[EPISODE[read.slot]] if read.slot >= 0 else (FAINT, "white")
            face = {"learn": strong, "burn": light, "next": "white", "masked": "white"}[read.kind]
            ink = "white" if read.kind == "learn" else "#9AA5B1" if read.kind == "masked" else strong
            _cell(axes, x, at, face, "#C3CAD3" if read.kind == "masked" else strong, 0.9, dashed=read.kind == "masked")
            axes.text(x + 0.5, at, read.text, ha="center", va="center", color=ink, fontsize=8)
            x += 1
        x += 0.35
    if line.note:
        axes.text(x, at, line.note, va="center", color=FAINT, fontsize=8.5)


def _cell(axes: Any, x: float, y: float, face: str, edge: str, width: float, *, dashed: bool = False) -> None:
    axes.add_patch(_box(x, y, face, edge, width, dashed=dashed))


def _box(x: float, y: float, face: str, edge: str, width: float, *, dashed: bool = False) -> FancyBboxPatch:
    style = "round,pad=0,rounding_size=0.12"
    return FancyBboxPatch(
        (x + 0.06, y - 0.38), 0.88, 0.76, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=width,
        linestyle=(0, (2, 1.5)) if dashed else "-", zorder=3 if face == "none" else 2,
    )  # fmt: skip


def _legend(axes: Any, scene: Scene, at: float) -> None:
    x, strong, light = 0.0, FAINT, "#E4E7EB"
    for kind, text in scene.legend:
        if kind == "next" and scene.name == "nstep":
            axes.annotate("", (x + 0.85, at), (x + 0.25, at), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2})
        else:
            face = {"learn": strong, "burn": light, "start": light, "next": "white", "masked": "white"}[kind]
            _cell(axes, x, at, face, "#C3CAD3" if kind == "masked" else strong, 0.8, dashed=kind == "masked")
        axes.text(x + 1.15, at, text, va="center", color=FAINT, fontsize=8)
        x += 1.9 + 0.205 * len(text)
    axes.add_patch(_box(x, at, "none", INK, 1.7))
    drawn = "first row of the slice" if scene.name == "slices" else "drawn row"
    axes.text(x + 1.15, at, drawn, va="center", color=FAINT, fontsize=8)
