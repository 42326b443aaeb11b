"""The entry point: finds out whether the command line can run before anything of it is imported."""

from __future__ import annotations

import io
import sys

from ostinato.errors import MissingExtraError

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """Run the `ostinato` command with the process's arguments, and exit.

    Characters that the terminal's encoding does not have are written as escapes.

    Raises:
        SystemExit: always; 0 fine, 1 the work failed, 2 wrong usage, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from ostinato.cli.app import run

        run()
    except MissingExtraError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
