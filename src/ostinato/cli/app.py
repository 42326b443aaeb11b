"""The commands and their options. Each one calls a function of the package and shows what it returns."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ostinato import __version__
from ostinato._optional import require
from ostinato.cli import show, tables, trajectories, view
from ostinato.cli.arguments import ALLOW_PICKLE, JSON, OVERWRITE, check_free_paths, one_path
from ostinato.cli.output import answer, to_json
from ostinato.durable.files import atomic_write
from ostinato.errors import OstinatoError

if TYPE_CHECKING:
    import typer
else:
    typer = require("typer", "cli")

__all__ = ["app", "run"]

app = typer.Typer(
    name="ostinato",
    help="Ostinato: replay buffers that are fast and exact.",
    epilog="Examples:  ostinato demo   ·   ostinato inspect ostinato-demo/checkpoint\n\n"
    "Exit status of every command: 0 fine, 1 the work failed, 2 wrong usage, 130 interrupted (Ctrl-C).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def run() -> None:
    """Parse the arguments and run the command; errors of the library and the system become one line.

    Raises:
        SystemExit: always; 0 fine, 1 the work failed, 2 wrong usage, 130 interrupted.
    """
    try:
        app()
    except (OstinatoError, OSError) as error:
        show.error(str(error))
        raise SystemExit(1) from None


def _show_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(f"ostinato {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Replay buffers that are fast and exact."""


@app.command(epilog="Example:  ostinato demo runs/demo --seed 3")
def demo(
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT_DIR",
            help="Where checkpoint, picture and report go: ostinato-demo unless given.",
            show_default=False,
        ),
    ] = None,
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    steps: Annotated[
        int, typer.Option(min=10, help="Most environment steps; fewer than 10,000 shrink all phases.")
    ] = 30_000,
    output_dir: Annotated[
        Path | None, typer.Option(help="The same as the argument OUTPUT_DIR.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    prioritized: Annotated[
        bool, typer.Option("--prioritized", help="Draw rows by their temporal-difference errors, not uniformly.")
    ] = False,
    n_step: Annotated[
        int, typer.Option(min=1, help="Steps whose rewards are added up before the target bootstraps.")
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads that torch may use.")] = 1,
) -> None:
    """Train a small agent on CartPole, and save, reopen and draw its buffer.

    Double DQN on Gymnasium's CartPole-v1 through the public API: collect, extend, sample, learn. Takes about half a
    minute. Writes a checkpoint of the buffer, demo.png and report.json to the output directory.
    Exit status: 0 fine, 1 failed, 2 wrong usage.
    """
    for module, extra in (("gymnasium", "demo"), ("matplotlib", "viz")):
        require(module, extra)  # now, not after the training
    from ostinato.demo import DqnConfig, picture, save_and_reopen, train
    from ostinato.viz import draw

    given = output is not None or output_dir is not None
    directory = one_path(output, output_dir, "--output-dir") if given else Path("ostinato-demo")
    saved, drawn, told = (directory / name for name in ("checkpoint", "demo.png", "report.json"))
    check_free_paths(saved, drawn, told, overwrite=overwrite)
    directory.mkdir(parents=True, exist_ok=True)
    config = DqnConfig(seed=seed, threads=threads, prioritized=prioritized, n_step=n_step).over(steps)
    with show.training(config) as on_progress:
        report = train(config, on_progress)
    show.result(report)
    reopened = save_and_reopen(report, saved)
    draw(picture(report), drawn)
    summary = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "buffer"}
    summary = {**summary, "config": asdict(config), "mean_return": report.mean_return}
    atomic_write(told, f"{to_json(summary)}\n".encode())
    show.files(reopened, drawn)


@app.command(
    epilog="Examples:  ostinato inspect runs/checkpoint   ·   ostinato inspect --json runs/rollouts | jq .total_samples"
)
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Directory that dumps() wrote, or a directory of trajectories.")
    ],
    *,
    as_json: Annotated[bool, JSON] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read the manifest or index only: no checksums, statistics or keys.")
    ] = False,
    allow_pickle: Annotated[bool, ALLOW_PICKLE] = False,
) -> None:
    """Show what a checkpoint or a directory of trajectories holds: fields, shapes, dtypes, bytes, rows.

    Of a buffer's checkpoint every file is read and its checksums are compared, of trajectories the size and the
    header of each file, unless --quick (`ostinato verify` reads everything).
    Exit status: 0 fine, 1 missing or damaged, 2 wrong usage.
    """
    from ostinato.tools import inspect_checkpoint, inspect_store, kind_of

    if kind_of(path) == "trajectories":
        store = inspect_store(path, read_headers=not quick, allow_pickle=allow_pickle)
        answer(store, tables.store, as_json=as_json)
    elif allow_pickle:
        msg = f"--allow-pickle is for directories of trajectories, {path} is none"
        raise typer.BadParameter(msg)
    else:
        answer(inspect_checkpoint(path, read_data=not quick), show.checkpoint, as_json=as_json)


trajectories.register(app)
view.register(app)
