"""The page of the command line: each command's usage, arguments, options and examples, read from the application."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def page() -> str:
    """Return the page of `ostinato` and all of its commands as Markdown."""
    import typer

    from ostinato.cli.commands import app

    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = ["# Command line", "", "`ostinato COMMAND --help` prints what this page says.", ""]
    lines += ["```sh", "pip install 'ostinato[cli]'", "```", ""]
    lines += ["| command | purpose |", "|---|---|"]
    for name, command in commands.items():
        purpose = command.help.partition("\n\n")[0]
        lines.append(f"| [`ostinato {name}`](#ostinato-{name}) | {_cell(purpose)} |")
    lines += ["", "Exit status of every command: 0 success, 1 failure, 2 wrong usage, 130 interrupted (Ctrl-C).", ""]
    for name, command in commands.items():
        lines += _command(f"ostinato {name}", command)
    return "\n".join(lines)


def _command(title: str, command: Any) -> Iterator[str]:
    with command.make_context(title, [], resilient_parsing=True) as context:
        yield from (f"## {title}", "", command.help, "")
        yield from ("```sh", " ".join([title, *command.collect_usage_pieces(context)]), "```", "")
        rows = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    yield from ("| argument or option | meaning |", "|---|---|")
    yield from (f"| `{_cell(name)}` | {_cell(meaning)} |" for name, meaning in filter(None, rows))
    if command.epilog:
        examples = re.findall(r"^- `(.+)`$", command.epilog, flags=re.MULTILINE)
        yield from ("", "```sh", *examples, "```")
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("[required]", "**required**")
