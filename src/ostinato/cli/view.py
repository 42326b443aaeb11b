"""The commands that show data: view and plot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ostinato._optional import require
from ostinato.cli.arguments import ALLOW_PICKLE, OVERWRITE, check_free_paths, one_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    import typer

    from ostinato.viz import Spot
    from ostinato.viz.reel import Reels
else:
    typer = require("typer", "cli")

__all__ = ["register"]

_OUTPUT = Path("viz.png")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(
        epilog="Examples:  ostinato view runs/rollouts   ·   ostinato view --replay_dir runs/rollouts --headless "
        "--output viz.png   ·   ostinato view runs/rollouts --save-image --no-display --trajectory 7 --step 20   ·   "
        "ostinato view runs/rollouts --web   ·   ostinato view runs/checkpoint"
    )(view)
    app.command(
        epilog="Examples:  ostinato plot runs/checkpoint --output report.png   ·   ostinato plot runs/rollouts"
    )(plot)


def view(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="Directory of trajectories, or one that dumps() wrote.", show_default=False
        ),
    ] = None,
    *,
    replay_dir: Annotated[Path | None, typer.Option("--replay-dir", "--replay_dir", help="The same as PATH.")] = None,
    camera: Annotated[
        str | None,
        typer.Option(
            help="Observation to look at: main_images, wrist_images, extra_view_images, states, ...; '*' for every "
            "camera. Without it main_images, else the first camera there is, else the vectors as lines.",
            show_default=False,
        ),
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="No window: commands from the terminal, the picture in a file.")
    ] = False,
    save_image: Annotated[
        bool, typer.Option("--save-image", "--save_image", help="Write the picture at every move, beside the window.")
    ] = False,
    no_display: Annotated[
        bool, typer.Option("--no-display", "--no_display", help="With --save-image: write one picture and exit.")
    ] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a page for the browser of this machine.")] = False,
    rerun: Annotated[
        Path | None, typer.Option(help="Write one trajectory as .rrd file for the Rerun viewer.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The picture to write, viz.png unless given; the key s writes beside it.", show_default=False
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of --web; 0, the default, takes a free one.")
    ] = None,
    trajectory: Annotated[
        int | None, typer.Option(min=0, help="Id of the trajectory to begin with.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step to begin with.", show_default=False)] = None,
    batch: Annotated[
        int | None, typer.Option(min=0, help="Batch index (environment) to begin with.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    allow_pickle: Annotated[bool, ALLOW_PICKLE] = False,
) -> None:
    """Look at trajectories step by step: in a window, in a terminal, in a browser, in Rerun.

    Keys of the window: left/right or p/n step (over the ends of trajectories, too), up/down next and previous
    trajectory, b/v next and previous batch index, Home/End first and last step, s saves the picture, q or Esc ends;
    typing an id into the box jumps to it.

    Commands of --headless: n/next, p/prev, nt/nexttraj, pt/prevtraj, j ID, info, q/quit.

    Exit status: 0 fine, 1 missing or damaged, 2 wrong usage.
    """
    where = one_path(path, replay_dir, "--replay-dir", "PATH")
    chosen = [
        name
        for name, given in (("--headless", headless), ("--no-display", no_display), ("--web", web), ("--rerun", rerun))
        if given
    ]
    _check_usage(chosen, save_image=save_image, output=output, port=port, camera=camera, start=(step, batch))
    written = rerun or ((output or _OUTPUT) if headless or save_image else None)
    check_free_paths(*([] if written is None else [written]), overwrite=overwrite)
    from ostinato.viz import Spot, Walk

    reels = _reels(where, allow_pickle=allow_pickle)
    index = _index(reels, trajectory)
    spot = Spot(index, step or 0, batch or 0)
    walk = Walk(reels, spot)
    _check_place(reels, spot, walk.spot, camera)
    if web:
        from ostinato.viz.web import serve

        serve(reels, walk.spot, port or 0, typer.echo)
    elif rerun is not None:
        from ostinato.viz.recording import export

        typer.echo(f"written: {export(reels, index, rerun, camera=camera)}")
    elif headless:
        from ostinato.viz.prompt import converse

        converse(reels, walk, output or _OUTPUT, _lines(), typer.echo, camera=camera)
    elif no_display:
        from ostinato.viz import moment
        from ostinato.viz.board import Board, png_path, save

        target, board = png_path(output or _OUTPUT), Board.headless()
        board.show(moment(reels, walk.spot, camera))
        typer.echo(f"written: {save(board.figure, target)}")
    else:
        from ostinato.viz.window import open_window

        open_window(reels, walk, camera=camera, output=output or _OUTPUT, autosave=save_image)


def _check_usage(
    chosen: list[str],
    *,
    save_image: bool,
    output: Path | None,
    port: int | None,
    camera: str | None,
    start: tuple[int | None, int | None],
) -> None:
    """Refuse options that exclude each other, or that would have no effect."""
    problem = None
    if len(chosen) > 1:
        problem = f"{' and '.join(chosen)} exclude each other"
    elif "--no-display" in chosen and not save_image:
        problem = "--no-display needs --save-image: otherwise nothing would be shown or written"
    elif save_image and chosen not in ([], ["--no-display"]):
        problem = f"--save-image has no effect with {chosen[0]}"
    elif output is not None and chosen in (["--web"], ["--rerun"]):
        problem = f"--output has no effect with {chosen[0]}"
    elif port is not None and "--web" not in chosen:
        problem = "--port needs --web"
    elif camera is not None and "--web" in chosen:
        problem = "--camera has no effect with --web: the page shows every camera"
    elif start != (None, None) and "--rerun" in chosen:
        problem = "--step and --batch have no effect with --rerun: all steps of the whole batch are written"
    if problem:
        raise typer.BadParameter(problem)


def _check_place(reels: Reels, wanted: Spot, found: Spot, camera: str | None) -> None:
    """Refuse a step, a batch index or a camera that is not there; what is broken has none, and shows as such."""
    from ostinato.viz.moment import ALL_CAMERAS

    reel = reels.open(wanted.reel)
    if reel.problem:
        return
    if found != wanted:
        msg = f"--step and --batch must be below {reel.steps} and {reel.envs}, got {wanted.step} and {wanted.env}"
        raise typer.BadParameter(msg)
    cameras = {**reel.roles.current, **reel.roles.following}
    if camera not in {None, ALL_CAMERAS, *cameras}:
        msg = f"{reel.name} has no observation {camera!r}: --camera must be one of {', '.join(cameras)}, '*'"
        raise typer.BadParameter(msg)


def _reels(path: Path, *, allow_pickle: bool) -> Reels:
    from ostinato.tools import kind_of
    from ostinato.viz import SavedBuffer, TrajectoryFolder

    if kind_of(path) == "trajectories":
        return TrajectoryFolder(path, allow_pickle=allow_pickle)
    if allow_pickle:
        msg = f"--allow-pickle is for directories of trajectories, {path} is none"
        raise typer.BadParameter(msg)
    return SavedBuffer(path)


def _index(reels: Reels, number: int | None) -> int:
    index = 0 if number is None else reels.find(number)
    if index is None:
        from ostinato.viz.reel import span

        msg = f"there is no {reels.unit} {number}: {span(reels)}"
        raise typer.BadParameter(msg)
    return index


def _lines() -> Iterator[str]:
    """Yield the lines of standard input; a person at a terminal gets a prompt."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def plot(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Directory that dumps() wrote, or a directory of trajectories.")
    ],
    *,
    output: Annotated[Path, typer.Option(help="The picture to write.")] = Path("report.png"),
    overwrite: Annotated[bool, OVERWRITE] = False,
    allow_pickle: Annotated[bool, ALLOW_PICKLE] = False,
) -> None:
    """Draw one page about a buffer: returns, lengths, priorities, age of rows, bytes by field.

    Exit status: 0 fine, 1 missing or damaged, 2 wrong usage.
    """
    from ostinato.viz import draw
    from ostinato.viz.board import png_path
    from ostinato.viz.report import report

    target = png_path(output)
    check_free_paths(target, overwrite=overwrite)
    typer.echo(f"written: {draw(report(_reels(path, allow_pickle=allow_pickle)), target)}")
