"""The front page: reasons and times from README and the benchmarks, so that they are written once."""

from __future__ import annotations

import re
from pathlib import Path

import spread

PAGE = "README.md"
BEFORE = "\n## What do you want to do?\n"
"""The heading that follows what this module adds."""
README = Path(__file__).parents[2] / "README.md"


def with_reasons(markdown: str) -> str:
    """Return the front page with README's section "Why" and a picture of the benchmarks."""
    found = re.search(r"^## Why\n.*?(?=^## )", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if found is None or markdown.count(BEFORE) != 1:
        msg = f"README needs the heading '## Why', and docs/README.md once {BEFORE.strip()!r}"
        raise ValueError(msg)
    why = found[0].replace("](docs/", "](")
    times = [
        f"![Median times of Ostinato and other libraries at four works, on logarithmic axes]({spread.FRONT_PICTURE})",
        "",
        "Time per call, one thread: dots are medians, thin lines reach from the fastest to the slowest round; dashed:",
        "a C loop that copies the same bytes. [All benchmarks](benchmarks.md).",
        "",
    ]
    return markdown.replace(BEFORE, "\n".join(["", why.rstrip(), "", *times, BEFORE.lstrip("\n")]), 1)
