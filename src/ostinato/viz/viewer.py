"""The matplotlib viewer: draws frames on a figure, in a window controlled by keys or from commands in a terminal."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato._optional import require
from ostinato.errors import DamagedFileError, OptionError
from ostinato.viz.figures import FAINT, GRID, INK, LINES, STYLE, new_figure, output_path, save
from ostinato.viz.frames import read_frame
from ostinato.viz.sources import id_range, parse_number

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from ostinato.viz.frames import Frame, Navigator, ObservationView, Position, Timeline, Traces
    from ostinato.viz.sources import TrajectorySource

__all__ = [
    "COMMANDS",
    "DPI",
    "KEYS",
    "FrameFigure",
    "Window",
    "open_window",
    "run_prompt",
    "write_frame",
]

DPI = 150
_SIZE = (9.6, 6.6)
_END, _CURRENT = "#D55E00", "#1F2933"
_WIDTH = 130
_TOP, _TIMELINE_HEIGHT = 0.81, 0.13
_MAX_VECTORS = 5
_CAPTION = 0.03


@final
class FrameFigure:
    """Draws frames on a matplotlib figure, each in place of the previous one."""

    def __init__(self, figure: Any, *, foot: float = 0.0) -> None:
        """Wrap a figure; `show` draws on it.

        Args:
            figure: A matplotlib figure.
            foot: Fraction of the height to leave free at the bottom, for example for a text box.
        """
        self.figure = figure
        self._floor = foot + 0.075
        self._drawn: list[Any] = []
        self.pictures: list[Any] = []
        """Axes of the images drawn last, left ones first."""

    @classmethod
    def headless(cls) -> FrameFigure:
        """Return a figure that needs no display."""
        return cls(new_figure(_SIZE, DPI))

    def show(self, frame: Frame) -> None:
        """Draw a frame in place of the previous one; the canvas is not refreshed."""
        with require("matplotlib", "viz").rc_context(STYLE):
            for artist in self._drawn:
                artist.remove()
            self._drawn, self.pictures = [], []
            self._text(0.02, 0.965, frame.title, fontsize=14, fontweight="bold", va="center")
            facts = "" if frame.problem else "\n".join(_packed(frame.facts))
            self._text(0.02, 0.935, facts, fontsize=8.5, color=FAINT, va="top", linespacing=1.35)
            timeline = frame.timeline
            rows = 0 if timeline is None else (timeline.reward is not None) + (timeline.action is not None)
            bottom = self._floor + _TIMELINE_HEIGHT * rows + 0.035
            self._observation(frame.current, frame, (0.02, bottom, 0.46, _TOP - bottom))
            self._observation(frame.following, frame, (0.515, bottom, 0.46, _TOP - bottom))
            if timeline is not None:
                self._timeline(timeline, frame)

    def _text(self, x: float, y: float, text: str, **more: Any) -> None:
        self._drawn.append(self.figure.text(x, y, text, parse_math=False, **more))

    def _axes(self, box: tuple[float, float, float, float]) -> Any:
        axes = self.figure.add_axes(box)
        axes.set_navigate(False)
        self._drawn.append(axes)
        return axes

    def _observation(self, view: ObservationView, frame: Frame, box: tuple[float, float, float, float]) -> None:
        left, bottom, _, height = box
        self._text(left, bottom + height + 0.02, view.title, fontsize=10, fontweight="bold", va="bottom")
        if view.pictures:
            self._pictures(view, box)
        elif view.traces:
            self._vectors(view.traces, frame, box)
        else:
            axes = self._axes(box)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_facecolor("#F5F7FA")
            colour = _END if frame.problem else FAINT
            note = "\n".join(textwrap.wrap(view.note, 48))
            axes.text(0.5, 0.5, note, ha="center", va="center", color=colour, fontsize=9, parse_math=False)

    def _vectors(self, traces: Sequence[Traces], frame: Frame, box: tuple[float, float, float, float]) -> None:
        """Draw the vectors below each other with a shared step axis."""
        left, bottom, width, height = box
        kept = traces[:_MAX_VECTORS]
        if len(traces) > len(kept):
            more = f"{len(traces) - len(kept)} more: use --camera NAME to show one"
            self._text(left + width, bottom + height + 0.02, more, fontsize=8, color=FAINT, ha="right", va="bottom")
        share = (height - 0.03) / len(kept)
        for number, each in enumerate(kept):
            low = bottom + 0.03 + share * (len(kept) - 1 - number)
            axes = self._axes((left + 0.045, low, width - 0.05, share - 0.035))
            self._lines(axes, each)
            self._decorate(axes, each, frame)
            axes.set_title(_title(each), fontsize=8, fontweight="normal", pad=3)
            self._steps(axes, last=number == len(kept) - 1)

    def _pictures(self, view: ObservationView, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        count = len(view.pictures)
        across = _across([shown.pixels.shape for shown in view.pictures], width * _SIZE[0], height * _SIZE[1])
        wide, high = width / across, height / math.ceil(count / across)
        for number, shown in enumerate(view.pictures):
            row, column = divmod(number, across)
            place = (left + column * wide, bottom + height - (row + 1) * high)
            axes = self._axes((*place, wide - 0.01, high - _CAPTION))
            axes.imshow(shown.pixels, interpolation="nearest", vmin=0, vmax=255)
            axes.set_title(shown.camera, fontsize=8, fontweight="normal", pad=3)
            axes.set_anchor("NW")
            axes.set_axis_off()
            self.pictures.append(axes)

    def _timeline(self, timeline: Timeline, frame: Frame) -> None:
        bottom = self._floor
        for name, values in (("action", timeline.action), ("reward", timeline.reward)):
            if values is None:
                continue
            axes = self._axes((0.065, bottom, 0.91, _TIMELINE_HEIGHT - 0.035))
            if values is timeline.reward:
                self._reward(axes, values, timeline.ends)
            else:
                self._lines(axes, values)
            self._decorate(axes, values, frame)
            axes.set_ylabel(name, fontsize=8)
            self._steps(axes, last=bottom == self._floor)
            bottom += _TIMELINE_HEIGHT

    def _reward(self, axes: Any, reward: Traces, ends: np.ndarray) -> None:
        steps, values = reward.steps, reward.values[:, 0]
        axes.step(steps, values, where="mid", lw=1.4, color=LINES[0], marker=_marker(steps))
        axes.fill_between(steps, values, step="mid", alpha=0.15, color=LINES[0], lw=0)
        if len(ends):
            axes.vlines(ends, 0, 1, color=_END, lw=1.6, zorder=1, transform=axes.get_xaxis_transform())
            axes.text(1.0, 1.04, "| done", color=_END, fontsize=8, ha="right", transform=axes.transAxes)

    def _lines(self, axes: Any, traces: Traces) -> None:
        """Draw one line per component; the numbers at the top right are the legend."""
        count = traces.values.shape[1]
        for number, line in enumerate(traces.values.T):
            axes.plot(traces.steps, line, lw=1.1, color=LINES[number], marker=_marker(traces.steps))
            if count > 1:
                place = {"xytext": (-11 * (count - 1 - number), 3), "textcoords": "offset points"}
                axes.annotate(
                    str(number), (1, 1), xycoords="axes fraction", ha="right", fontsize=7, color=LINES[number], **place
                )

    def _decorate(self, axes: Any, traces: Traces, frame: Frame) -> None:
        if not np.isfinite(traces.values).any():
            axes.text(0.5, 0.5, "no finite number", ha="center", va="center", fontsize=8, transform=axes.transAxes)
            axes.set_yticks([])
        axes.axvline(frame.step, color=_CURRENT, lw=1.0, ls=(0, (4, 3)), zorder=5)
        axes.set_xlim(-0.5, frame.steps - 0.5)
        axes.tick_params(length=0, labelsize=7, colors=INK)
        axes.grid(color=GRID, lw=0.6)
        if len(axes.get_yticks()):
            axes.locator_params(axis="y", nbins=4)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if frame.steps == 1:
            axes.set_xticks([0])

    def _steps(self, axes: Any, *, last: bool) -> None:
        """Label the shared step axis below the last panel."""
        axes.tick_params(labelbottom=last)
        if last:
            axes.set_xlabel("step", fontsize=8, labelpad=2)


def _across(shapes: Sequence[tuple[int, ...]], width: float, height: float) -> int:
    """Return the number of columns for which the smallest image is largest."""

    def scale(across: int) -> float:
        wide, high = width / across, height / math.ceil(len(shapes) / across) - _CAPTION * _SIZE[1]
        return min(min(wide / shape[1], high / shape[0]) for shape in shapes)

    return max(range(1, len(shapes) + 1), key=scale)


def _marker(steps: np.ndarray) -> str:
    """Return a marker for a series of one point, which has no visible line."""
    return "o" if len(steps) == 1 else ""


def _packed(facts: tuple[tuple[str, str], ...]) -> list[str]:
    """Format facts in at most three lines without breaking one; `...` marks facts left out."""
    lines = [""]
    for word, value in facts:
        fact = f"{word}: {textwrap.shorten(value, _WIDTH - len(word) - 2)}"
        if lines[-1] and len(lines[-1]) + len(fact) > _WIDTH:
            lines.append("")
        lines[-1] += ("     " if lines[-1] else "") + fact
    return lines if len(lines) <= 3 else [*lines[:2], f"{lines[2]}     ..."]


def _title(traces: Traces) -> str:
    count = traces.values.shape[1]
    return traces.name if count == traces.components else f"{traces.name}, {count} of {traces.components} components"


def write_frame(source: TrajectorySource, position: Position, camera: str | None, path: str | os.PathLike[str]) -> Path:
    """Write the image of one step, and return its path.

    Raises:
        OptionError: The path is not one of a PNG file.
        DamagedFileError: The step cannot be read, as the image says.
    """
    drawing, frame = FrameFigure.headless(), read_frame(source, position, camera)
    drawing.show(frame)
    target = save(drawing.figure, path, DPI)
    if frame.problem:
        raise DamagedFileError(frame.problem)
    return target


KEYS: dict[str, str] = {
    "right": "next",
    "n": "next",
    "left": "previous",
    "p": "previous",
    "up": "next_trajectory",
    "down": "previous_trajectory",
    "b": "next_env",
    "v": "previous_env",
    "home": "first",
    "end": "last",
}
"""Keys and the methods of `Navigator` that they call; also: s saves, q and Esc close the window."""


@final
class Window:
    """An interactive figure. Methods must be called from the thread that owns the figure."""

    def __init__(
        self,
        figure: Any,
        source: TrajectorySource,
        navigator: Navigator,
        *,
        camera: str | None = None,
        output: Path | None = None,
        autosave: bool = False,
    ) -> None:
        """Draw the first frame and connect the key handlers.

        Args:
            figure: A matplotlib figure with a canvas.
            source: The trajectories.
            navigator: The start position; moved by keys.
            camera: See `read_frame`.
            output: The file that `autosave` writes; the key s writes next to it.
            autosave: Write `output` after each move.
        """
        widgets = require("matplotlib.widgets", "viz")
        self._source, self._walk, self._camera = source, navigator, camera
        self._output = output or Path("viz.png")
        self._autosave = autosave
        self.figure = figure
        self.frame_figure = FrameFigure(figure, foot=0.055)
        self.closed = False
        self._box = widgets.TextBox(
            figure.add_axes((0.2, 0.018, 0.12, 0.04)), f"jump to {source.unit} id ", textalignment="center"
        )
        self._box.label.set_fontsize(9)
        self._box.on_submit(self._submit)
        self._note = figure.text(0.34, 0.038, "", fontsize=8, va="center", color="#52606D")
        manager = figure.canvas.manager
        if manager is not None and getattr(manager, "key_press_handler_id", None) is not None:
            figure.canvas.mpl_disconnect(manager.key_press_handler_id)  # matplotlib binds s, p, q and v as well
        figure.canvas.mpl_connect("key_press_event", self._pressed)
        self.refresh("keys: left right up down b v Home End s q")

    def refresh(self, note: str = "") -> None:
        """Draw the frame at the current position."""
        self._note.set_text(note)
        self.frame_figure.show(read_frame(self._source, self._walk.position, self._camera))
        self.figure.canvas.draw_idle()
        if self._autosave:
            save(self.figure, self._output, DPI)

    def _pressed(self, event: Any) -> None:
        if self._box.capturekeystrokes:
            if event.key == "escape":
                self._box.set_val("")
                self._box.stop_typing()
            return
        if event.key in KEYS:
            moved = getattr(self._walk, KEYS[event.key])()
            self.refresh("" if moved else "no further step in this direction")
        elif event.key == "s":
            self._save_here()
        elif event.key in {"q", "escape"}:
            self._close()

    def _save_here(self) -> None:
        index, step, env = self._walk.position
        name = f"{self._output.stem}_{self._source.ids[index]}_{step}_{env}.png"
        try:
            saved = save(self.figure, self._output.with_name(name), DPI)
            self.refresh(f"saved {saved}")
        except (OSError, OptionError) as error:
            self.refresh(f"not saved: {error}"[:120])

    def _submit(self, text: str) -> None:
        if self._box.capturekeystrokes:  # otherwise the box captures all keys after Enter, also q and Esc
            self._box.stop_typing()  # calls this method again
            return
        text = text.strip()
        if not text:
            return
        self._box.set_val("")
        self.refresh(_jump(self._source, self._walk, text))

    def _close(self) -> None:
        self.closed = True
        if self.figure.canvas.manager is not None:
            require("matplotlib.pyplot", "viz").close(self.figure)


def open_window(
    source: TrajectorySource,
    navigator: Navigator,
    *,
    camera: str | None = None,
    output: Path | None = None,
    autosave: bool = False,
) -> None:
    """Show a window and return when it is closed.

    Raises:
        OptionError: There is no display, or no GUI toolkit for matplotlib.
    """
    matplotlib = require("matplotlib", "viz")
    pyplot = require("matplotlib.pyplot", "viz")
    backends = require("matplotlib.backends", "viz")
    name = pyplot.get_backend()
    interactive = backends.backend_registry.list_builtin(backends.BackendFilter.INTERACTIVE)
    if name.lower() not in {known.lower() for known in interactive}:
        msg = (
            f"cannot open a window with the matplotlib backend {name}: use --headless, --no-display with --save-image, "
            "or --web; or install a GUI toolkit such as PySide6"
        )
        raise OptionError(msg)
    with matplotlib.rc_context({"toolbar": "None"}):
        figure = pyplot.figure(figsize=_SIZE, num=f"ostinato view: {source.title}")
        Window(figure, source, navigator, camera=camera, output=output, autosave=autosave)
        pyplot.show(block=True)


COMMANDS: dict[str, str] = {
    "n": "next",
    "next": "next",
    "p": "previous",
    "prev": "previous",
    "nt": "next_trajectory",
    "nexttraj": "next_trajectory",
    "pt": "previous_trajectory",
    "prevtraj": "previous_trajectory",
}
"""Commands and the methods of `Navigator` that they call; also: j ID, info, q, quit."""
_HELP = "n/next  p/prev  nt/nexttraj  pt/prevtraj  j ID  info  q/quit"


def run_prompt(
    source: TrajectorySource,
    navigator: Navigator,
    output: str | os.PathLike[str],
    lines: Iterable[str],
    say: Callable[[str], None],
    *,
    camera: str | None = None,
) -> None:
    """Execute commands until q, quit or the end of `lines`.

    Args:
        source: The trajectories.
        navigator: The start position; moved by commands.
        output: The PNG file, which is written at the start and after each command, atomically.
        lines: Commands.
        say: Called with each line of output, without a newline.
        camera: See `read_frame`.

    Raises:
        OptionError: `output` is not a valid path of a PNG file.
    """
    target = output_path(output)
    figure = FrameFigure.headless()

    def draw() -> str:
        seen = read_frame(source, navigator.position, camera)
        figure.show(seen)
        save(figure.figure, target, DPI)
        return f"{seen.title}: " + ", ".join(f"{word} {value}" for word, value in seen.facts)

    say(f"{source.title}; writing {target}")
    if source.history:
        say(source.history)
    say(f"commands: {_HELP}")
    say(draw())
    for line in lines:
        words = line.split()
        if words in (["q"], ["quit"]):
            return
        note = _follow(source, navigator, words)
        shown = draw()
        say(note or shown)


def _jump(source: TrajectorySource, navigator: Navigator, text: str) -> str:
    """Go to the trajectory with an id. Return why that is not possible, or an empty string."""
    number = parse_number(text)
    found = number is not None and navigator.jump(number)
    return "" if found else f"there is no {source.unit} {text[:20]}: {id_range(source)}"


def _follow(source: TrajectorySource, navigator: Navigator, words: list[str]) -> str:
    """Execute a command. Return the message to print, or an empty string to print the position."""
    if not words or words == ["info"]:
        return ""
    if len(words) == 1 and words[0] in COMMANDS:
        return (
            "" if getattr(navigator, COMMANDS[words[0]])() else f"no further step in this direction: {id_range(source)}"
        )
    if words[0] == "j" and len(words) == 2:
        return _jump(source, navigator, words[1])
    return f"no command {' '.join(words)[:40]!r}: {_HELP}"
