"""The entry point. Checks that the packages of the command line are installed before it imports the commands."""

from __future__ import annotations

import io
import sys

from ostinato.errors import MissingExtraError

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """Run the `ostinato` command with the arguments of the process, and exit.

    Characters that the encoding of the terminal lacks are escaped.

    Raises:
        SystemExit: Always; 0 success, 1 failure, 2 wrong usage, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from ostinato.cli.commands import run

        run()
    except MissingExtraError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
