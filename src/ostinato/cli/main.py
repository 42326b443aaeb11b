"""The entry point: finds out whether the command line can run before anything of it is imported."""

from __future__ import annotations

import sys

from ostinato.errors import MissingExtraError

__all__ = ["main"]


def main() -> None:
    """Run the `ostinato` command with the process's arguments, and exit.

    Raises:
        SystemExit: always; 0 fine, 1 the work failed, 2 wrong usage.
    """
    try:
        from ostinato.cli.app import run
    except MissingExtraError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    run()
