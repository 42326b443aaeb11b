"""The figure of a training run: learning curve and contents of the buffer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato import PrioritizedSampler
from ostinato.core.options import number_of
from ostinato.demo.config import ENV_ID, SOLVED_RETURN
from ostinato.viz.figures import Bars, Curves, FigureSpec, Level, Line, Mark, Points, Stack, thin

if TYPE_CHECKING:
    from ostinato.demo.config import Report

__all__ = ["training_figure"]

_SMOOTH_EPISODES = 10
_MAX_POINTS = 6_000
_BARS = 24
_TRACK_M = 2.4
_LEANING_DEGREES = 12.0


def training_figure(report: Report) -> FigureSpec:
    """Return the figure of a run.

    Args:
        report: The result of `train`; its buffer is read, not changed.
    """
    rows = {name: column.numpy() for name, column in report.buffer.read_all_in_order().items()}
    final = f"final agent {report.final_return:.1f}"
    kept = f"kept agent (step {report.kept_step:,}) {report.kept_return:.1f}"
    agents = final if report.is_final_kept else f"{final}, {kept}"
    episodes = number_of(len(report.final_returns), "new episode")
    return FigureSpec(
        title=f"Double DQN on {ENV_ID}: {agents} (mean return of {episodes})",
        subtitle=(
            f"seed {report.config.seed} · {report.steps:,} environment steps · {report.updates:,} updates of "
            f"{report.config.batch_size} {_drawn(report.config.n_step)} · {report.seconds:.0f} s · "
            f"buffer {len(report.buffer):,} of {report.config.capacity:,} rows"
        ),
        rows=(
            (_learning(report),),
            (_states(rows, report.steps), _ages(rows, report.steps), _last_panel(report, rows)),
        ),
    )


def _drawn(n_step: int) -> str:
    return "rows" if n_step == 1 else f"{n_step}-step returns"


def _learning(report: Report) -> Curves:
    steps, returns = report.episode_steps, report.episode_returns
    return Curves(
        title="Return per training episode",
        x_label="environment steps",
        y_label="return (steps upright)",
        lines=(
            Line("episode, with exploration", _floats(steps), _floats(returns), "quiet", "dots"),
            Line(f"mean of {_SMOOTH_EPISODES} episodes", _floats(steps), _trailing_mean(returns), "first"),
            Line(
                f"validation: mean of {report.config.validation_episodes}\nepisodes, greedy",
                _floats(report.validation_steps),
                report.validation_returns,
                "second",
                "beads",
            ),
        ),
        levels=(Level(SOLVED_RETURN, f"solved: {SOLVED_RETURN:g}"),),
        marks=_marks(report),
        y_range=(0.0, 520.0),
    )


def _marks(report: Report) -> tuple[Mark, ...]:
    """Mark the returns of the agents in the evaluation, at the steps of their weights."""
    episodes = number_of(len(report.final_returns), "new episode")
    if report.is_final_kept:
        return (Mark(report.steps, report.final_return, f"final agent, which is kept:\nmean of {episodes}"),)
    return (
        Mark(report.kept_step, report.kept_return, f"kept agent:\nmean of {episodes}"),
        Mark(report.steps, report.final_return, "final agent:\nmean of the same ones", "D"),
    )


def _states(rows: dict[str, Any], now: int) -> Points:
    """Plot the states of the rows."""
    order = np.argsort(rows["step"])
    chosen = order[list(thin(len(order), _MAX_POINTS))]
    share = "" if len(chosen) == len(order) else f" (1 row in {math.ceil(len(order) / _MAX_POINTS)})"
    observations = rows["observation"][chosen]
    return Points(
        title=f"States in the buffer{share}",
        x_label="cart position (m)",
        y_label="pole angle (degrees)",
        value_label="age (environment steps)",
        x=_floats(observations[:, 0]),
        y=_floats(np.degrees(observations[:, 2])),
        value=_floats(now - rows["step"][chosen]),
        levels=(
            Level(-_TRACK_M, "end of episode", axis="x"),
            Level(_TRACK_M, axis="x"),
            Level(-_LEANING_DEGREES),
            Level(_LEANING_DEGREES),
        ),
    )


def _ages(rows: dict[str, Any], now: int) -> Bars:
    """Plot rows by age and by how their episode ended."""
    ages = now - rows["step"]
    terminated = np.isin(rows["episode"], rows["episode"][rows["terminated"]])
    truncated = np.isin(rows["episode"], rows["episode"][rows["truncated"]]) & ~terminated
    edges = np.linspace(0, max(int(ages.max()), 1), _BARS + 1)
    return Bars(
        title="Age of rows by end of episode",
        x_label="age (environment steps)",
        y_label="rows",
        edges=_floats(edges),
        stacks=(
            Stack("terminated", _counts(ages[terminated], edges), "second"),
            Stack("truncated", _counts(ages[truncated], edges), "first"),
            Stack("unfinished", _counts(ages[~terminated & ~truncated], edges), "quiet"),
        ),
    )


def _actions(rows: dict[str, Any]) -> Bars:
    """Plot rows by pole angle and action."""
    angles = np.degrees(rows["observation"][:, 2])
    edges = np.linspace(-_LEANING_DEGREES, _LEANING_DEGREES, _BARS + 1)
    return Bars(
        title="Pole angle by action",
        x_label="pole angle (degrees)",
        y_label="rows",
        edges=_floats(edges),
        stacks=(
            Stack("push left", _counts(angles[rows["action"] == 0], edges), "third"),
            Stack("push right", _counts(angles[rows["action"] == 1], edges), "first"),
        ),
    )


def _last_panel(report: Report, rows: dict[str, Any]) -> Bars:
    sampler = report.buffer.sampler
    if not isinstance(sampler, PrioritizedSampler):
        return _actions(rows)
    return _priorities(sampler, rows)


def _priorities(sampler: PrioritizedSampler, rows: dict[str, Any]) -> Bars:
    """Plot rows by priority, on a logarithmic axis."""
    kept = sampler.priorities.numpy() + sampler.eps
    exponents = np.log10(kept)
    edges = np.linspace(exponents.min() - 0.05, exponents.max() + 0.05, _BARS + 1)
    ended = rows["terminated"]
    return Bars(
        title="Priorities: last |TD error|",
        x_label=f"log10(priority + {sampler.eps:g})",
        y_label="rows",
        edges=_floats(edges),
        stacks=(
            Stack("not terminal", _counts(exponents[~ended], edges), "first"),
            Stack("terminal", _counts(exponents[ended], edges), "second"),
        ),
    )


def _counts(values: Any, edges: Any) -> tuple[float, ...]:
    return _floats(np.histogram(values, bins=edges)[0])


def _trailing_mean(returns: tuple[float, ...]) -> tuple[float, ...]:
    sums = np.cumsum((0.0, *returns))
    ends = np.arange(1, len(returns) + 1)
    starts = np.maximum(ends - _SMOOTH_EPISODES, 0)
    return _floats((sums[ends] - sums[starts]) / (ends - starts))


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
