"""Arguments that several commands have, and the checks of what was given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ostinato._optional import require
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    import typer
else:
    typer = require("typer", "cli")

__all__ = ["ALLOW_PICKLE", "JSON", "OVERWRITE", "check_free_paths", "one_path"]

ALLOW_PICKLE = typer.Option(
    "--allow-pickle", help="Consent to unpickle: reading a .pkl file runs whatever code it brings."
)
JSON = typer.Option("--json", help="Print JSON for machines.")
OVERWRITE = typer.Option("--overwrite", help="Replace files that exist; without it they are left alone, with an error.")


def one_path(argument: Path | None, option: Path | None, name: str, metavar: str = "") -> Path:
    """Return a path that may be given as an argument or as a long option.

    Args:
        argument: What was given by position.
        option: What was given by name.
        name: The option.
        metavar: The argument; by default the option's name in capitals.

    Raises:
        BadParameter: Neither was given, or both.
    """
    metavar = metavar or name.removeprefix("--").replace("-", "_").upper()
    if argument is not None and option is not None:
        msg = f"the path was given twice, as {metavar} {argument} and as {name} {option}: give one of them"
        raise typer.BadParameter(msg)
    path = option if argument is None else argument
    if path is None:
        msg = f"a path is missing: give {metavar}, or {name}"
        raise typer.BadParameter(msg)
    return path


def check_free_paths(*paths: Path, overwrite: bool) -> None:
    """Raise before any work if a file to be written exists, unless it may be replaced.

    Raises:
        CheckpointError: Naming the first one that exists.
    """
    for path in paths:
        if not overwrite and os.path.lexists(path):
            msg = f"{path} exists: give --overwrite to replace it, or choose another path"
            raise CheckpointError(msg)
