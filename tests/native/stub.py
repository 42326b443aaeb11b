"""The stub of the native extension, generated from its signatures. Run as a script to write the file.

Docstrings stand in `native/bind_*.cpp`, and `help(ostinato._native)` shows them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nanobind.stubgen import ReplacePattern, StubGen

if TYPE_CHECKING:
    from types import ModuleType

STUB = Path(__file__).parents[2] / "src" / "ostinato" / "_native.pyi"

ALIASES = r"""
\from typing import TypeAlias
Int64Address: TypeAlias = int
Int32Address: TypeAlias = int
Float64Address: TypeAlias = int
Float32Address: TypeAlias = int
FloatAddress: TypeAlias = int
BoolAddress: TypeAlias = int
RowsAddress: TypeAlias = int
AddressArray: TypeAlias = int

"""


def generate(module: ModuleType) -> str:
    """Return the stub of `ostinato._native`, formatted as the package is."""
    prefix = ReplacePattern(re.compile(rf"{module.__name__}\.__prefix__"), ALIASES.strip().splitlines(), 0)
    made = StubGen(module, include_docstrings=False, patterns=[prefix])
    made.put(module)
    text: str = made.get()
    for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    from ostinato import _native

    STUB.write_text(generate(_native), encoding="utf-8")
