"""Run the examples at full size, keep their pictures, and print what each one takes.

    python docs/pictures/examples/run.py                       # all of them, about half an hour on two cores
    python docs/pictures/examples/run.py hindsight_bit_flip    # one of them

The pictures go to this folder, reduced to 64 colors, for `examples/README.md`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
COLORS = 64


def reduce(source: Path, target: Path) -> None:
    """Write a picture with few colors, which takes a fraction of the bytes."""
    picture = Image.open(source).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    picture.save(target, optimize=True)


def run(name: str) -> None:
    """Run one example and keep its picture; print wall clock and processor time, processes that it starts included."""
    with tempfile.TemporaryDirectory() as folder:
        picture, start, before = Path(folder) / "picture.png", time.perf_counter(), os.times()
        command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--picture", str(picture)]
        subprocess.run(command, cwd=folder, check=True)
        wall, after = time.perf_counter() - start, os.times()
        reduce(picture, FOLDER / f"{name}.png")
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    sys.stdout.write(f"{name}: {wall:.0f} s, processor time {busy:.0f} s, {os.cpu_count()} cores\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for one in sys.argv[1:] or sorted(path.stem for path in (ROOT / "examples").glob("*.py")):
        run(one)
