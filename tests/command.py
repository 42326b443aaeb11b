"""The `ostinato` command: in a process of its own as users run it, or in this one, which has imported torch already."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

__all__ = ["START", "answer", "facts", "fails", "run_here", "run_process"]

START = "from ostinato.cli.main import main; main()"
_PLAIN = {"COLUMNS": "200", "TERM": "dumb"}


def run_process(*arguments: str, start: str = START, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: for what depends on the process, as it takes seconds to start."""
    settings = {**os.environ, **_PLAIN, **env}
    settings.pop("FORCE_COLOR", None) if "FORCE_COLOR" not in env else None
    command = [sys.executable, "-W", "ignore", "-c", start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=280, check=False)


def run_here(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    from ostinato.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["ostinato", *map(str, arguments)])
        patch.delenv("FORCE_COLOR", raising=False)
        for name, value in {**_PLAIN, **env}.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def facts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Names and values that a report has printed, one in a line."""
    return dict(re.findall(r"^  (\S.*?)  +(.+)$", done.stdout, re.MULTILINE))


def answer(*arguments: object, status: int = 0) -> Any:
    """Run the command with `--json`, and return what it answers."""
    done = run_here(*arguments, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def fails(status: int, words: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Check that a command prints nothing but one error that has some words, and return what it did."""
    done = run_here(*arguments, **env)
    message = " ".join(done.stderr.replace("│", "").split())  # without its frame and its line breaks
    assert (done.returncode, done.stdout, words in message) == (status, "", True), (arguments, done.stderr)
    assert status == 2 or done.stderr.count("\n") == 1, done.stderr
    return done
