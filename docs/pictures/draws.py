"""Pictures of the draws of samplers and of `Hindsight`, counted in real buffers; `make pictures` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from card import BLUE, DPI, FAINT, GREEN, GRID, INCHES, INK, LIGHT_BLUE, LIGHT_GREEN, LIGHT_ORANGE, ORANGE, save
from matplotlib.figure import Figure

from ostinato import (
    Hindsight,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
)
from ostinato.samplers.priorities import make_tree

HERE = Path(__file__).parent


def sheet(height: float, title: str, words: str) -> Figure:
    """Return a figure with a title and a line of words, which together are 0.7 inches high."""
    figure = Figure(figsize=(INCHES, height), dpi=DPI, facecolor="white")
    figure.text(0.03, 1 - 0.25 / height, title, fontsize=12, fontweight="bold", va="center", color=INK)
    figure.text(0.03, 1 - 0.52 / height, words, fontsize=10, va="center", color=FAINT)
    return figure


def stack(figure: Figure, count: int, titles: list[str], *, left: float = 0.1, share: float = 0.6) -> list[Any]:
    """Return panels below each other, each `share` of its part high, all with the same x axis."""
    height = float(figure.get_size_inches()[1])
    part = (height - 0.8) / count
    boxes = [(left, (part * (count - i - 1) + 0.5) / height, 0.96 - left, share * part / height) for i in range(count)]
    return [panel(figure, box, title) for box, title in zip(boxes, titles, strict=True)]


def panel(figure: Figure, box: tuple[float, float, float, float], title: str = "") -> Any:
    """Return axes with light spines."""
    axes = figure.add_axes(box)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=FAINT, labelsize=10, length=0)
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    return axes


def make_buffer(rows: dict[str, torch.Tensor], **options: Any) -> ReplayBuffer:
    """Return a buffer that holds the rows."""
    count = len(next(iter(rows.values())))
    rb = ReplayBuffer(storage=LazyTensorStorage(count), generator=torch.Generator().manual_seed(0), **options)
    rb.extend(rows)
    return rb


def share(slots: torch.Tensor, rows: int) -> list[float]:
    """Return how often each row was drawn, relative to all draws."""
    return (slots.bincount(minlength=rows).double() / slots.numel()).tolist()


def sum_tree() -> Figure:
    """The leaves of a tree with eight children per node, and the way of one draw."""
    leaves = [2, 1, 3, 1, 4, 2, 1, 2, 1, 5, 2, 1, 3, 6, 1, 2, 1, 2, 1, 3, 1, 2, 1, 2]
    tree = make_tree(len(leaves), torch.device("cpu"))
    tree.load(torch.tensor(leaves, dtype=torch.float64))
    total, uniform = sum(leaves), 0.63
    slot = int(tree.draw(torch.tensor([uniform], dtype=torch.float64))[0])
    sums = [sum(leaves[i : i + 8]) for i in range(0, 24, 8)]
    point, node = uniform * total, slot // 8
    words = f"24 rows; u = {uniform} of the sum {total}: {point:g} is looked for"
    figure = sheet(4.3, "One draw from a sum tree", words)
    axes = figure.add_axes((0.02, 0.0, 0.96, 0.84))
    axes.set_axis_off()
    axes.set_xlim(-0.4, 24.4)
    axes.set_ylim(-3.4, 7.2)
    tile(axes, 9.8, 6.5, 4.4, f"sum = {total}", GRID, INK)
    for i, value in enumerate(sums):
        at, chosen = 8 * i + 4, i == node
        axes.plot([12, at], [5.95, 4.65], color=INK if chosen else GRID, lw=2.2 if chosen else 1.2, zorder=1)
        tile(axes, at - 1.3, 4.1, 2.6, f"{value}", ORANGE if chosen else GRID, "white" if chosen else INK)
        for j in range(8):
            leaf = 8 * i + j
            mine = leaf == slot
            axes.plot([at, leaf + 0.5], [3.55, 2.35], color=INK if mine else GRID, lw=2.2 if mine else 0.9, zorder=1)
            face, ink = (BLUE, "white") if mine else (LIGHT_BLUE, BLUE)
            tile(axes, leaf + 0.04, 1.8, 0.92, str(leaves[leaf]), face, ink)
            axes.text(leaf + 0.5, 0.85, str(leaf), ha="center", va="center", color=FAINT, fontsize=8.5)
    before, inside = sum(sums[:node]), point - sum(sums[:node])
    words = f"{before} before this node:\n{point:g} - {before} = {inside:g} is left"
    axes.text(8 * node + 2.4, 5.3, words, color=ORANGE, ha="right", va="center", fontsize=10)
    passed = sum(leaves[8 * node : slot])
    words = f"{passed} in its first rows, {passed} + {leaves[slot]} > {inside:g}: row {slot} is drawn"
    axes.text(12, -0.6, words, ha="center", va="center", color=BLUE, fontsize=10)
    words = f"P(row {slot}) = {leaves[slot]}/{total}. A level costs eight additions at most,\nso a draw costs O(log N)."
    axes.text(0, -2.3, words, va="center", color=FAINT, fontsize=10)
    return figure


def tile(axes: Any, x: float, y: float, width: float, text: str, face: str, ink: str) -> None:
    """Draw a box with a number."""
    box = mpl.patches.FancyBboxPatch(
        (x, y - 0.5), width, 1.0, boxstyle="round,pad=0,rounding_size=0.12", facecolor=face, edgecolor="none", zorder=2
    )
    axes.add_patch(box)
    axes.text(x + width / 2, y, text, ha="center", va="center", color=ink, fontsize=9.5, zorder=3)


def priorities() -> Figure:
    """Formula and counted draws for three values of alpha."""
    given = torch.tensor([0.1, 0.2, 0.5, 1.0, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    figure = sheet(6.2, "P(i) = p\u1d62\u1d45 / sum of all", "eight rows; bars: formula, dots: 50,000 draws")
    words = {0.0: "uniform", 0.6: "a compromise", 1.0: "in proportion"}
    panels = stack(figure, 3, [f"alpha = {alpha:g}: {word}" for alpha, word in words.items()])
    for axes, alpha in zip(panels, words, strict=True):
        rb = make_buffer({"row": torch.arange(8)}, sampler=PrioritizedSampler(8, alpha, 0.0, eps=0.0))
        rb.update_priority(torch.arange(8), given)
        counted = share(rb.sample(50_000)["row"], 8)
        formula = (given**alpha / (given**alpha).sum()).tolist()
        axes.bar(range(8), formula, color=LIGHT_BLUE, edgecolor=BLUE, linewidth=0.8, width=0.8)
        axes.plot(range(8), counted, "o", color=ORANGE, markersize=5)
        axes.set_xticks(range(8), [f"{p:g}" for p in given.tolist()])
        axes.set_ylim(0, 0.56)
        axes.set_yticks([0, 0.25, 0.5])
    panels[-1].set_xlabel("priority of the row", fontsize=10, color=FAINT)
    return figure


def epochs() -> Figure:
    """Which batch drew which row, with and without replacement."""
    rows, size = 24, 4
    figure = sheet(5.8, "24 draws from 24 rows", "six batches of four; below, how often each row was drawn")
    samplers = {"RandomSampler()": RandomSampler(), "SamplerWithoutReplacement()": SamplerWithoutReplacement()}
    panels = stack(figure, 2, list(samplers), left=0.12, share=0.72)
    for axes, sampler in zip(panels, samplers.values(), strict=True):
        rb = make_buffer({"row": torch.arange(rows)}, sampler=sampler)
        counts = [0] * rows
        for batch in range(rows // size):
            for row in rb.sample(size)["row"].tolist():
                axes.add_patch(mpl.patches.Rectangle((row, batch), 1, 1, facecolor=BLUE, edgecolor="white"))
                counts[row] += 1
        for row, count in enumerate(counts):
            face = {0: "white", 1: LIGHT_BLUE}.get(count, LIGHT_ORANGE)
            axes.add_patch(mpl.patches.Rectangle((row, 6.4), 1, 1, facecolor=face, edgecolor=GRID))
            axes.text(
                row + 0.5, 6.9, str(count), ha="center", va="center", fontsize=9.5, color=ORANGE if not count else INK
            )
        axes.set_xlim(0, rows)
        axes.set_ylim(7.5, 0)
        axes.set_yticks([0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.9], ["1", "2", "3", "4", "5", "6", "draws"])
        axes.set_xticks([0.5, 11.5, 22.8], ["row 0", "row 11", "row 23"])
        missed = counts.count(0)
        words = f"{missed} rows were never drawn" if missed else "every row was drawn once"
        axes.text(rows, -0.3, words, ha="right", color=FAINT, fontsize=9.5)
        axes.set_ylabel("batch", fontsize=10, color=FAINT)
        axes.grid(color=GRID, linewidth=0.4)
        axes.set_axisbelow(True)
    return figure


def hindsight() -> Figure:
    """The new goals of one row, by strategy."""
    steps = torch.arange(12)
    angle = steps * 0.22
    place = torch.stack((steps * 0.85, 2.2 * torch.sin(angle * 2.0) + 0.2 * steps), -1)
    goal, anchor = torch.tensor([10.5, -1.6]), 4
    figure = sheet(3.9, "Hindsight: the new goals of a step t", "star: the desired goal, never reached")
    words = {"future": "a later step", "final": "the last step", "episode": "any step"}
    for i, (strategy, word) in enumerate(words.items()):
        unit = Hindsight(lambda batch: torch.zeros(len(batch["row"])), her_ratio=1.0, strategy=strategy)
        rows = {
            "row": steps[:-1],
            "achieved_goal": place[:-1],
            "next_achieved_goal": place[1:],
            "desired_goal": goal.expand(11, 2),
            "reward": torch.zeros(11),
            "done": steps[:-1] == 10,
        }
        batch = make_buffer(rows, sample_unit=unit).sample(4_000)
        chosen = batch["desired_goal"][batch["row"] == anchor]
        used = [k for k in range(12) if bool((chosen == place[k]).all(-1).any())]
        axes = panel(figure, (0.02 + 0.325 * i, 0.14, 0.31, 0.53), f'"{strategy}"\n{word}')
        axes.set_xticks([])
        axes.set_yticks([])
        axes.plot(*place.T, "-", color=GRID, lw=2, zorder=1)
        axes.scatter(*place.T, s=22, facecolor="white", edgecolor=FAINT, zorder=2)
        axes.scatter(*place[used].T, s=34, color=GREEN, zorder=3)
        axes.scatter(*place[anchor], s=90, facecolor="none", edgecolor=INK, linewidth=1.8, zorder=4)
        axes.annotate("t", place[anchor].tolist(), (-3, 11), textcoords="offset points", fontsize=9.5, color=INK)
        axes.plot(*goal, marker="*", color=ORANGE, markersize=13)
        axes.set_xlim(-0.6, 11.3)
        axes.set_ylim(-2.6, 4.9)
    legend = "green: achieved goals that replace it; ring: step t"
    figure.text(0.03, 0.06, legend, color=FAINT, fontsize=10, va="center")
    return figure


def mixing() -> Figure:
    """Rows of a dataset in small batches, by rounding, and the sum over batches."""
    size, target, batches = 4, 0.3, 20
    figure = sheet(5.6, "Three tenths of each batch from a dataset", "of four rows 1.2 are due")
    titles = ['rows of the dataset in each batch, rounding="carry"', "rows given, less those due"]
    upper, lower = stack(figure, 2, titles, share=0.68)
    random = {"p=[0.3, 0.7]": {"p": [target, 1 - target], "num_buffer_sampled": size}}
    exact = {f'rounding="{name}"': {"ratio": target, "rounding": name} for name in ("carry", "nearest")}
    for (label, options), color in zip((exact | random).items(), (BLUE, ORANGE, GREEN), strict=True):
        members = [make_buffer({"source": torch.full((50,), k)}) for k in (0, 1)]
        mixed = (
            ReplayBufferEnsemble(
                *members, batch_size=size, flatten=True, generator=torch.Generator().manual_seed(3), **options
            )
            if "p" in options
            else ReplayBufferEnsemble(*members, batch_size=size, **options)
        )
        counts = torch.tensor([int((mixed.sample()["source"] == 0).sum()) for _ in range(batches)])
        drift = counts.cumsum(0) - target * size * torch.arange(1, batches + 1)
        lower.plot(range(1, batches + 1), drift, color=color, lw=1.6, marker="o", markersize=3)
        lower.text(batches + 0.6, float(drift[-1]), label, color=color, fontsize=9.5, va="center")
        if label == 'rounding="carry"':
            upper.bar(range(1, batches + 1), counts, color=LIGHT_BLUE, edgecolor=BLUE, linewidth=0.8)
    upper.axhline(target * size, color=INK, lw=1, linestyle=(0, (3, 2)))
    upper.set_ylim(0, 2.4)
    upper.set_yticks([0, 1, 2])
    lower.axhspan(-0.5, 0.5, color=LIGHT_BLUE, zorder=0)
    for axes in (upper, lower):
        axes.set_xlim(0.3, 28)
        axes.set_xticks([1, 5, 10, 15, 20])
    lower.set_xlabel("batch", fontsize=10, color=FAINT)
    return figure


def staleness() -> Figure:
    """The probability of a row by the version of its policy."""
    figure = sheet(4.8, "Probability of a row by its policy", "the learner has version 9; bars: formula, dots: draws")
    versions = torch.arange(10).repeat_interleave(100)
    kinds = {"StalenessAwareSampler()": -1, "StalenessAwareSampler(max_staleness=4)": 4}
    panels = stack(figure, 2, list(kinds))
    for axes, limit in zip(panels, kinds.values(), strict=True):
        sampler = StalenessAwareSampler(limit, version_key="version")
        rb = make_buffer({"version": versions}, sampler=sampler)
        sampler.consumer_version = 9
        drawn = torch.cat([rb.sample(1)["version"] for _ in range(20_000)])
        age = 9 - torch.arange(10)
        weight = (1.0 / (age + 1)) * ((age <= limit) | (limit < 0))
        axes.bar(range(10), (weight / weight.sum()).tolist(), color=LIGHT_GREEN, edgecolor=GREEN, linewidth=0.8)
        axes.plot(range(10), share(drawn, 10), "o", color=ORANGE, markersize=5)
        axes.set_xticks(range(10))
        axes.set_ylim(0, 0.5)
        axes.set_yticks([0, 0.25, 0.5])
    panels[-1].set_xlabel("version of the row", fontsize=10, color=FAINT)
    return figure


def reservoir() -> Figure:
    """When the rows were written that two full buffers hold."""
    figure = sheet(4.6, "The 500 rows left of 10,000", "by the time of their writing")
    made = {"RoundRobinWriter(): the newest": None, "ReservoirWriter(): a uniform sample of all": ReservoirWriter()}
    panels = stack(figure, 2, list(made))
    for axes, writer in zip(panels, made.values(), strict=True):
        torch.manual_seed(0)
        rb = ReplayBuffer(storage=LazyTensorStorage(500), writer=writer)
        for start in range(0, 10_000, 500):
            rb.extend({"step": torch.arange(start, start + 500)})
        axes.hist(rb["step"].tolist(), bins=20, range=(0, 10_000), color=LIGHT_ORANGE, edgecolor=ORANGE, linewidth=0.8)
        axes.set_yscale("symlog", linthresh=100)
        axes.set_ylim(0, 600)
        axes.set_yticks([0, 25, 100, 500], ["0", "25", "100", "500"])
    panels[-1].set_xlabel("number of the row, in the order of writing", fontsize=10, color=FAINT)
    return figure


FIGURES = {
    "sum-tree": sum_tree,
    "priorities": priorities,
    "epochs": epochs,
    "hindsight": hindsight,
    "mixing": mixing,
    "staleness": staleness,
    "reservoir": reservoir,
}


if __name__ == "__main__":
    with mpl.rc_context({"font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": FAINT}):
        for name, make in FIGURES.items():
            save(make(), HERE / f"{name}.png")
