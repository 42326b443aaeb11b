"""The window and the terminal viewer: key events on a figure, whose images are read back."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ostinato.errors import OptionError
from ostinato.viz import Navigator, TrajectoryFolder
from tests.unit.viz.rollouts import read_stamp, store

if TYPE_CHECKING:
    from pathlib import Path

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return store(tmp_path / "a")


class Keys:
    """A window on a canvas without display, and what is on it."""

    def __init__(self, path: Path, **options: Any) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        from ostinato.viz.viewer import Window

        self.source = TrajectoryFolder(path)
        self.navigator = Navigator(self.source)

        class Canvas(FigureCanvasAgg):
            def draw_idle(self, *args: Any, **options: Any) -> None:
                """Draw later, as canvases on a screen do: here, never."""

        figure = Figure(figsize=(9.6, 6.6), dpi=50)
        self.canvas = Canvas(figure)
        self.window = Window(figure, self.source, self.navigator, **options)

    def press(self, *keys: str) -> tuple[int, ...]:
        from matplotlib.backend_bases import KeyEvent

        for key in keys:
            self.canvas.callbacks.process("key_press_event", KeyEvent("key_press_event", self.canvas, key))
        return self.left() if self.window.frame_figure.pictures else ()

    def _pixels(self, axes: Any) -> tuple[int, ...]:
        return read_stamp(axes.get_images()[0].get_array())

    def left(self) -> tuple[int, ...]:
        return self._pixels(self.window.frame_figure.pictures[0])

    def right(self) -> tuple[int, ...]:
        return self._pixels(self.window.frame_figure.pictures[-1])

    def texts(self) -> str:
        return "\n".join(text.get_text() for text in self.window.figure.texts)

    def type(self, text: str, end: str = "enter") -> None:
        """Click into the box and press keys, as a person does."""
        from matplotlib.backend_bases import MouseButton, MouseEvent

        x, y = self.window._box.ax.transAxes.transform((0.5, 0.5))
        for name in ("button_press_event", "button_release_event"):
            self.canvas.callbacks.process(name, MouseEvent(name, self.canvas, x, y, MouseButton.LEFT))
        self.press(*text, end)


def test_keys_move_as_the_document_says(path):
    keys = Keys(path)
    assert (keys.left(), keys.right()) == ((0, 0, 0), (0, 0, 5))
    for key, *place in (
        ("right", 0, 1, 0),
        ("n", 0, 2, 0),
        ("right", 1, 0, 0),  # over the end
        ("left", 0, 2, 0),  # and back
        ("p", 0, 1, 0),
        ("up", 1, 0, 0),
        ("up", 2, 0, 0),
        ("up", 2, 0, 0),
        ("end", 2, 3, 0),
        ("b", 2, 3, 50),
        ("v", 2, 3, 0),
        ("home", 2, 0, 0),
        ("down", 1, 0, 0),
        ("x", 1, 0, 0),
        ("right", 1, 1, 0),
    ):
        assert keys.press(key) == tuple(place), key
    for words in ("trajectory 1 (2 of 3)", "step: 1 of 2", "batch: 0 of 1", "reward: 1.01", "done: yes", "action: ["):
        assert words in keys.texts()
    assert keys.press("end", "up", "up", "end", "right") == (2, 3, 0)
    assert "no further step" in keys.texts()
    figure, counts = keys.window.figure, set()
    for _ in range(3):
        keys.press("left")
        counts.add((len(figure.axes), len(figure.texts)))
    assert len(counts) == 1, "figures do not grow"


def test_the_text_box_jumps_and_keys_typed_there_do_not_move(path):
    keys = Keys(path)
    keys.type("2")
    assert keys.left() == (2, 0, 0)
    keys.type("99")
    assert "there is no trajectory 99: ids are 0 to 2, 3 in all" in keys.texts()
    keys.type("p1", "left")
    assert keys.left() == (2, 0, 0)
    for text in ("\u00b2", "9" * 5000, "1 2"):
        keys.window._submit(text)
        assert "there is no trajectory" in keys.texts()
    keys.type("2")
    assert keys.press("right") == (2, 1, 0), "after Enter keys move again"
    keys.type("1", "escape")
    assert keys.left() == (2, 1, 0), "Esc leaves the box without a jump"
    assert not keys.window.closed


def test_s_saves_and_q_and_escape_end(path, tmp_path):
    from PIL import Image

    keys = Keys(path, output=tmp_path / "out.png")
    keys.press("right", "s")
    saved = tmp_path / "out_0_1_0.png"
    with Image.open(saved) as picture:
        assert picture.info["dpi"] == pytest.approx((150, 150), abs=0.1)
        assert picture.size == (1440, 990)
    assert not (tmp_path / "out.png").exists()
    assert f"saved {saved}" in keys.texts()
    keys.press("q")
    assert keys.window.closed
    assert Keys(path).press("escape") == (0, 0, 0)
    keys = Keys(path, output=tmp_path / "viz.png", autosave=True)
    first = (tmp_path / "viz.png").read_bytes()
    keys.press("right")
    assert (tmp_path / "viz.png").read_bytes() != first


def test_a_window_without_a_display_raises(path, monkeypatch):
    from ostinato.viz.viewer import open_window

    matplotlib.use("agg")
    source = TrajectoryFolder(path)
    with pytest.raises(OptionError, match="use --headless"):
        open_window(source, Navigator(source))


def test_the_prompt_follows_commands(path, tmp_path):
    from ostinato.viz.viewer import run_prompt

    said: list[str] = []
    pictures = []
    source = TrajectoryFolder(path)
    navigator = Navigator(source)
    script = [
        ("n\n", (0, 1)), ("next", (0, 2)), ("n", (1, 0)), ("info", (1, 0)), ("prev", (0, 2)), ("pt", (0, 2)),
        ("j 2", (2, 0)), ("j 9", (2, 0)), ("what is this", (2, 0)), ("prevtraj", (1, 0)), ("nt", (2, 0)),
    ]  # fmt: skip

    def lines() -> Any:
        for line, position in script:
            yield line
            assert navigator.position[:2] == position, line
            pictures.append((tmp_path / "viz.png").read_bytes())
        yield "quit"
        pytest.fail("quit must end it")

    run_prompt(source, navigator, tmp_path / "viz.png", lines(), said.append)
    assert said[3].startswith("trajectory 0 (1 of 3): step 1 of 3, batch 0 of 2, action [")
    assert "no further step in this direction" in said[8]
    assert "there is no trajectory 9" in said[10]
    assert "no command 'what is this'" in said[11]
    assert pictures[2] == pictures[3] != pictures[4] == pictures[1]


@pytest.mark.slow
def test_a_window_on_a_virtual_display(path):
    pytest.importorskip("tkinter")
    if shutil.which("xvfb-run") is None:
        pytest.skip("xvfb-run is needed for a real window")
    code = """
import sys; from ostinato.viz import *; from ostinato.viz.viewer import open_window
import matplotlib; matplotlib.use('TkAgg'); import matplotlib.pyplot as plt
from matplotlib.backend_bases import KeyEvent
source = TrajectoryFolder(sys.argv[1]); navigator = Navigator(source)
def drive():
    canvas = plt.gcf().canvas
    for key in ('right', 'q'): KeyEvent('key_press_event', canvas, key)._process()
show = plt.show
def timed(**more):
    timer = plt.gcf().canvas.new_timer(interval=200); timer.single_shot = True
    timer.add_callback(drive); timer.start(); show(**more)
plt.show = timed
open_window(source, navigator); print(tuple(navigator.position))
"""
    command = ["xvfb-run", "-a", sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "(0, 1, 0)\n", done.stderr
