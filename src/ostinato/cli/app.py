"""The commands and their options. Each one calls a function of the package and shows what it returns."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ostinato._optional import require
from ostinato.cli import show
from ostinato.errors import OstinatoError

if TYPE_CHECKING:
    import typer
else:
    typer = require("typer", "cli")

__all__ = ["app", "run"]

app = typer.Typer(
    name="ostinato",
    help="Ostinato: replay buffers that are fast and exact.",
    epilog="Examples:  ostinato demo   ·   ostinato inspect ostinato-demo/checkpoint",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def run() -> None:
    """Parse the arguments and run the command; errors of the library and the system become one line.

    Raises:
        SystemExit: always; 0 fine, 1 the work failed, 2 wrong usage.
    """
    try:
        app()
    except (OstinatoError, OSError) as error:
        show.error(str(error))
        raise SystemExit(1) from None


def _show_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(f"ostinato {version('ostinato')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Replay buffers that are fast and exact."""


@app.command(epilog="Example:  ostinato demo --seed 3 --output-dir /tmp/demo")
def demo(
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    steps: Annotated[
        int, typer.Option(min=10, help="Most environment steps; fewer than 10,000 shrink all phases.")
    ] = 30_000,
    output_dir: Annotated[Path, typer.Option(help="Where checkpoint, picture and report go.")] = Path("ostinato-demo"),
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
    """
    for module, extra in (("gymnasium", "demo"), ("matplotlib", "viz")):
        require(module, extra)  # now, not after the training
    from ostinato.demo import DqnConfig, picture, save_and_reopen, train
    from ostinato.viz import draw

    output_dir.mkdir(parents=True, exist_ok=True)
    config = DqnConfig(seed=seed, threads=threads, prioritized=prioritized, n_step=n_step).over(steps)
    with show.training(config) as on_progress:
        report = train(config, on_progress)
    show.result(report)
    reopened = save_and_reopen(report, output_dir / "checkpoint")
    drawn = draw(picture(report), output_dir / "demo.png")
    summary = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "buffer"}
    summary = {**summary, "config": asdict(config), "mean_return": report.mean_return}
    (output_dir / "report.json").write_text(_json(summary) + "\n")
    show.files(reopened, drawn)


@app.command(
    epilog="Examples:  ostinato inspect runs/checkpoint   ·   ostinato inspect --json runs/checkpoint | jq .rows"
)
def inspect(
    path: Annotated[Path, typer.Argument(help="Directory that dumps() wrote.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read the manifest only: no checksums or statistics.")] = False,
) -> None:
    """Show what a checkpoint holds: fields, shapes, dtypes, bytes, rows and simple statistics.

    Reads every file block by block and compares its checksums, unless --quick. Exit status: 0 fine, 1 the checkpoint
    is missing or damaged, 2 wrong usage.
    """
    from ostinato.tools import inspect_checkpoint

    report = inspect_checkpoint(path, read_data=not quick)
    if as_json:
        typer.echo(_json(asdict(report)))
    else:
        show.checkpoint(report)


def _json(value: Any) -> str:
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Turn infinities and NaN, which JSON has no words for, into text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
