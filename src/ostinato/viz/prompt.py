"""The prompt: commands line by line over any terminal; the picture is written anew after each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.viz.board import Board, png_path, save
from ostinato.viz.moment import moment
from ostinato.viz.reel import number_in, span

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from ostinato.viz.reel import Reels
    from ostinato.viz.walk import Walk

__all__ = ["COMMANDS", "converse"]

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
"""Words and the moves of `Walk` that they make; besides: j ID, info, q, quit."""
_HELP = "n/next  p/prev  nt/nexttraj  pt/prevtraj  j ID  info  q/quit"


def converse(
    reels: Reels,
    walk: Walk,
    output: str | os.PathLike[str],
    lines: Iterable[str],
    say: Callable[[str], None],
    *,
    camera: str | None = None,
) -> None:
    """Follow commands until q, quit or the end of the lines.

    Args:
        reels: The trajectories.
        walk: Where to begin.
        output: The picture, written at the start and after each command, whole each time.
        lines: Commands.
        say: Called with each answer; without a line's end.
        camera: See `moment`.

    Raises:
        OptionError: `output` is no path of a picture.
    """
    target = png_path(output)
    board = Board.headless()

    def draw() -> str:
        seen = moment(reels, walk.spot, camera)
        board.show(seen)
        save(board.figure, target)
        return f"{seen.title}: " + ", ".join(f"{word} {value}" for word, value in seen.facts)

    say(f"{reels.title}; the picture is {target}")
    if reels.history:
        say(reels.history)
    say(f"commands: {_HELP}")
    say(draw())
    for line in lines:
        words = line.split()
        if words in (["q"], ["quit"]):
            return
        note = _follow(reels, walk, words)
        shown = draw()
        say(note or shown)


def _follow(reels: Reels, walk: Walk, words: list[str]) -> str:
    """Make the move of a line; return what to say instead of the position, or nothing."""
    if not words or words == ["info"]:
        return ""
    if len(words) == 1 and words[0] in COMMANDS:
        return "" if getattr(walk, COMMANDS[words[0]])() else f"nothing further this way: {span(reels)}"
    if words[0] == "j" and len(words) == 2:
        number = number_in(words[1])
        found = number is not None and walk.jump(number)
        return "" if found else f"there is no {reels.unit} {words[1][:40]}: {span(reels)}"
    return f"no command {' '.join(words)[:40]!r}: {_HELP}"
