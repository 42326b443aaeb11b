"""A copy of the tree whose package holds changes behind a switch, with an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

from tests.mutants import native
from tests.mutants.changes import Change, switched

__all__ = ["ROOT", "make_copy", "python_of"]

ROOT = Path(__file__).parents[2]


def make_copy(folder: Path, changes: dict[int, Change]) -> None:
    """Copy what git tracks or does not ignore to a folder, and place the changes in it by their numbers.

    The environment imports the package from the copy, and all other packages from the environment of this process.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    shutil.rmtree(folder, ignore_errors=True)
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    of_file: defaultdict[str, dict[int, Change]] = defaultdict(dict)
    for number, change in changes.items():
        of_file[change.key.file][number] = change
    for name, placed in of_file.items():
        place = switched if name.endswith(".py") else native.switched
        (folder / name).write_bytes(place((ROOT / name).read_bytes(), placed))
    shutil.copy2(Path(__file__).with_name("mutant_switch.py"), folder / "src")
    packages = Path(sysconfig.get_path("purelib"))
    if any(name.startswith("native/") for name in of_file):
        native.build(folder, folder.with_name("native"))
    else:
        for extension in (packages / "ostinato").glob("_native*"):
            shutil.copy2(extension, folder / "src" / "ostinato")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    own = folder / ".venv" / packages.relative_to(sys.prefix)
    (own / "copy.pth").write_text(f"{folder / 'src'}\n{packages}\n")
    command = folder / ".venv" / "bin" / "ostinato"
    command.write_text(f"#!{python_of(folder)}\nimport sys\nfrom ostinato.cli.main import main\nsys.exit(main())\n")
    command.chmod(0o755)


def python_of(folder: Path) -> Path:
    """The interpreter that runs the copy."""
    return folder / ".venv" / "bin" / "python"
