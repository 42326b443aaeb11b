"""The window: keys and a text box move over the trajectories, the board shows where they lead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ostinato._optional import require
from ostinato.errors import OptionError
from ostinato.viz.board import Board, save
from ostinato.viz.moment import moment
from ostinato.viz.reel import number_in, span

if TYPE_CHECKING:
    from ostinato.viz.reel import Reels
    from ostinato.viz.walk import Walk

__all__ = ["KEYS", "Window", "open_window"]

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
"""Keys and the moves of `Walk` that they make; besides: s saves, q and Esc end."""


@final
class Window:
    """A board on a figure that listens to keys. Moves happen in the thread that owns the figure."""

    def __init__(
        self,
        figure: Any,
        reels: Reels,
        walk: Walk,
        *,
        camera: str | None = None,
        output: Path | None = None,
        autosave: bool = False,
    ) -> None:
        """Draw the first moment and listen.

        Args:
            figure: A figure of matplotlib, with a canvas.
            reels: The trajectories.
            walk: Where to begin.
            camera: See `moment`.
            output: The picture that `autosave` writes; the key s writes beside it.
            autosave: Write `output` at every move.
        """
        widgets = require("matplotlib.widgets", "viz")
        self._reels, self._walk, self._camera = reels, walk, camera
        self._output = output or Path("viz.png")
        self._autosave = autosave
        self.figure = figure
        self.board = Board(figure, foot=0.055)
        self.closed = False
        self._box = widgets.TextBox(
            figure.add_axes((0.2, 0.018, 0.12, 0.04)), f"jump to {reels.unit} id ", textalignment="center"
        )
        self._box.label.set_fontsize(9)
        self._box.on_submit(self._submit)
        self._note = figure.text(0.34, 0.038, "", fontsize=8, va="center", color="#52606D")
        manager = figure.canvas.manager
        if manager is not None and getattr(manager, "key_press_handler_id", None) is not None:
            figure.canvas.mpl_disconnect(manager.key_press_handler_id)  # its own s, p, q and v would act as well
        figure.canvas.mpl_connect("key_press_event", self._pressed)
        self.refresh("keys: left right up down b v Home End s q")

    def refresh(self, note: str = "") -> None:
        """Draw where the walk stands."""
        self._note.set_text(note)
        self.board.show(moment(self._reels, self._walk.spot, self._camera))
        self.figure.canvas.draw_idle()
        if self._autosave:
            save(self.figure, self._output)

    def _pressed(self, event: Any) -> None:
        if self._box.capturekeystrokes:
            if event.key == "escape":
                self._box.set_val("")
                self._box.stop_typing()
            return
        if event.key in KEYS:
            moved = getattr(self._walk, KEYS[event.key])()
            self.refresh("" if moved else "nothing further this way")
        elif event.key == "s":
            self._save_here()
        elif event.key in {"q", "escape"}:
            self._close()

    def _save_here(self) -> None:
        index, step, env = self._walk.spot
        name = f"{self._output.stem}_{self._reels.ids[index]}_{step}_{env}.png"
        try:
            saved = save(self.figure, self._output.with_name(name))
            self.refresh(f"saved {saved}")
        except (OSError, OptionError) as error:
            self.refresh(f"not saved: {error}"[:120])

    def _submit(self, text: str) -> None:
        if self._box.capturekeystrokes:  # else the box would swallow every key after Enter, q and Esc among them
            self._box.stop_typing()  # calls this once more
            return
        text = text.strip()
        if not text:
            return
        self._box.set_val("")
        number = number_in(text)
        found = number is not None and self._walk.jump(number)
        self.refresh("" if found else f"there is no {self._reels.unit} {text[:20]}: {span(self._reels)}")

    def _close(self) -> None:
        self.closed = True
        if self.figure.canvas.manager is not None:
            require("matplotlib.pyplot", "viz").close(self.figure)


def open_window(
    reels: Reels, walk: Walk, *, camera: str | None = None, output: Path | None = None, autosave: bool = False
) -> None:
    """Show a window and return when it is closed.

    Raises:
        OptionError: There is no display, or no toolkit that matplotlib could open a window with.
    """
    matplotlib = require("matplotlib", "viz")
    pyplot = require("matplotlib.pyplot", "viz")
    backends = require("matplotlib.backends", "viz")
    name = pyplot.get_backend()
    if name.lower() not in {known.lower() for known in backends.backend_registry.list_builtin(_interactive(backends))}:
        msg = (
            f"no window can be opened here (matplotlib's backend is {name}): use --headless, --no-display with "
            "--save-image, or --web; or install a toolkit such as PySide6"
        )
        raise OptionError(msg)
    with matplotlib.rc_context({"toolbar": "None"}):
        figure = pyplot.figure(figsize=(9.6, 6.6), num=f"ostinato view: {reels.title}")
        Window(figure, reels, walk, camera=camera, output=output, autosave=autosave)
        pyplot.show(block=True)


def _interactive(backends: Any) -> Any:
    return backends.BackendFilter.INTERACTIVE
