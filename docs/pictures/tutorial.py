"""Pictures of the tutorial, made by running its blocks: returns of step 2, the report of step 5."""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl
from card import BLUE, FAINT, GRID, INK, save
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from ostinato.cli.commands import app

HERE = Path(__file__).parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(pages: list[Path]) -> dict[str, Any]:
    """Run the Python blocks of the pages in the current folder, up to the first save."""
    names: dict[str, Any] = {"__name__": "__tutorial__"}
    for page in pages:
        for text in BLOCK.findall(page.read_text()):
            exec(compile(text, page.name, "exec"), names)
            if ".dumps(" in text:
                return names
    msg = "no block of the tutorial saves a checkpoint"
    raise LookupError(msg)


def returns(values: list[float]) -> Figure:
    """The return of each episode of step 2."""
    with mpl.rc_context({"font.family": "DejaVu Sans", "text.color": INK}):
        figure = Figure(figsize=(6.4, 3.0), dpi=150, facecolor="white")
        axes = figure.add_axes((0.11, 0.17, 0.86, 0.78))
        axes.plot(values, color=BLUE, marker="o", markersize=4, lw=1.4)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRID)
        axes.grid(axis="y", color=GRID, lw=0.8)
        axes.tick_params(colors=FAINT, labelsize=11, length=0)
        axes.set_xlabel("episode", fontsize=12, color=FAINT)
        axes.set_ylabel("return", fontsize=12, color=FAINT)
        axes.set_ylim(0)
    return figure


def report(folder: Path, path: Path) -> None:
    """Plot the checkpoint of step 5 as `ostinato plot` does."""
    result = CliRunner().invoke(app, ["plot", str(folder / "run" / "checkpoint"), "--output", str(folder / "page.png")])
    if result.exit_code:
        raise RuntimeError(result.output)
    page = Image.open(folder / "page.png").convert("RGB")
    page.resize((1120, 1120 * page.height // page.width), Image.Resampling.LANCZOS).quantize(
        48, dither=Image.Dither.NONE
    ).save(path, optimize=True)


if __name__ == "__main__":
    mpl.use("agg")
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        names = run(sorted((HERE.parent / "tutorial").glob("*.md")))
        save(returns(names["returns"](names["rb"]).tolist()), (HERE / "tutorial-returns").with_suffix(".png"))
        report(Path(folder), (HERE / "tutorial-report").with_suffix(".png"))
        os.chdir(before)
