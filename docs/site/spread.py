"""The spread of the benchmarks, from `benchmarks/published.json`: a picture, and tables of the rounds."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # other packages install a folder of this name: ours must come first

from benchmarks.published import END, README_WORKS, Published, Times, Work  # noqa: E402
from benchmarks.records import LIMIT_PREFIX  # noqa: E402
from benchmarks.targets import OURS, human  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig

PAGE = "benchmarks.md"
PICTURE = "pictures/times.svg"
FRONT_PICTURE = "pictures/times-front.svg"
FRONT_WORKS = ("uniform.dict", "extend.dict", "prioritized.dict", "slices-writing.dict")
"""The works of the front page: those of the first reason in README."""
INK, FAINT, BLUE, ORANGE, GRID = "#1F2933", "#52606D", "#0072B2", "#B36B00", "#E4E7EB"
ROW, HEAD = 0.27, 0.62
"""Height of a library's row, and of what is above and below the rows of a work, in inches."""


def pictures(config: MkDocsConfig) -> Iterator[File]:
    """Yield pictures of the times of README's works, and of the front page's: medians, quartiles, extreme rounds."""
    found = Published.read()
    works = {work.name: work for work in found.works}
    titles = {library.name: library.title for library in found.libraries}
    for path, names in ((PICTURE, README_WORKS), (FRONT_PICTURE, FRONT_WORKS)):
        yield File.generated(config, path, content=_draw([works[name] for name in names], titles))


def with_spread(markdown: str) -> str:
    """Return the page of the benchmarks with the picture, and tables of all rounds, behind its table."""
    return markdown.replace(END, END + "\n\n" + "\n".join(_section(Published.read())), 1)


def _section(found: Published) -> Iterator[str]:
    rounds = {len(times.rounds_s) for work in found.works for times in work.times.values()}
    yield from ("### Spread", "", f"![Times of each library at ten works, on logarithmic axes]({PICTURE})", "")
    if rounds == {1}:
        yield "Of this run only the medians were kept: the picture shows no spread, and there are no tables of"
        yield from ("rounds. A report of all rounds brings both.", "")
        return
    yield "Dots are medians over the rounds, thick lines span the middle half of the rounds, thin lines all of"
    yield from ("them. Dashed: the fastest limit. `spread` is the slowest round divided by the fastest.", "")
    titles = {library.name: library.title for library in found.libraries}
    families: dict[str, list[Work]] = {}
    for work in found.works:
        families.setdefault(work.name.partition(".")[0], []).append(work)
    for family, works in families.items():
        yield from (f'??? note "Rounds of `{family}`"', "")
        yield "    | work | library | rounds | median | middle half | fastest to slowest | spread |"
        yield "    |---|---|---:|---:|---:|---:|---:|"
        yield from (f"    {row}" for work in works for row in _rows(work, titles))
        yield ""


def _rows(work: Work, titles: dict[str, str]) -> Iterator[str]:
    for number, (name, times) in enumerate(_fastest_first(work)):
        first, third = times.quartiles_s
        low, high = times.range_s
        cells = [work.title if number == 0 else "", titles[name], str(len(times.rounds_s)), human(times.median_s)]
        cells += [f"{human(first)} to {human(third)}", f"{human(low)} to {human(high)}", f"{high / low:.2f}x"]
        yield "| " + " | ".join(cells) + " |"


def _fastest_first(work: Work) -> list[tuple[str, Times]]:
    return sorted(work.times.items(), key=lambda item: item[1].median_s)


def _draw(works: list[Work], titles: dict[str, str]) -> bytes:
    shown = [[(n, t) for n, t in _fastest_first(work) if not n.startswith(LIMIT_PREFIX)] for work in works]
    heights = [HEAD + ROW * len(rows) for rows in shown]
    style = {"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "svg.hashsalt": "ostinato"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(6.4, sum(heights)), facecolor="white")
        top = sum(heights)
        for work, rows, height in zip(works, shown, heights, strict=True):
            box = (0.235, (top - height + 0.24) / sum(heights), 0.73, ROW * len(rows) / sum(heights))
            _panel(figure.add_axes(box), work, rows, titles)
            top -= height
        drawn = BytesIO()
        FigureCanvasSVG(figure).print_svg(drawn, metadata={"Date": None})
    return drawn.getvalue()


def _panel(axes: Any, work: Work, rows: list[tuple[str, Times]], titles: dict[str, str]) -> None:
    """Draw one work: a line, a thick line and a dot for each library, the fastest on top."""
    for at, (name, times) in enumerate(rows):
        color = BLUE if name.startswith(OURS) else ORANGE
        axes.plot(times.range_s, [at, at], color=color, lw=1.2, solid_capstyle="butt")
        axes.plot(times.quartiles_s, [at, at], color=color, lw=4, alpha=0.45, solid_capstyle="butt")
        axes.plot([times.median_s], [at], "o", color=color, ms=5)
        axes.annotate(
            human(times.median_s), (times.range_s[1], at), (6, 0), textcoords="offset points",
            va="center", fontsize=8, color=FAINT,
        )  # fmt: skip
    if work.limit_s is not None:
        axes.axvline(work.limit_s, color=FAINT, lw=1, ls=(0, (3, 2)), zorder=0)
    times = [s for _, each in rows for s in each.range_s] + ([work.limit_s] if work.limit_s else [])
    axes.set_xscale("log")
    axes.set_xlim(min(times) / 1.5, max(times) * 4)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [titles[name] for name, _ in rows])
    axes.tick_params(which="both", length=0, labelsize=8.5, colors=INK)
    axes.xaxis.set_major_formatter(lambda seconds, _: human(seconds))
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.tick_params(axis="x", labelsize=7.5, colors=FAINT, pad=2)
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(work.title, loc="left", fontsize=9, fontweight="bold", pad=4, x=-0.3)
