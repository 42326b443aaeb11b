"""Places where a long name in a table may be broken on a narrow screen: between its words, and not inside one."""

from __future__ import annotations

import re

_CELL = re.compile(r"<td\b[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_BETWEEN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_.(/\[])(?=[\w\"'\[{])")


def with_breaks(html: str) -> str:
    """Return a page with `<wbr>` between the words of the names in its tables, such as `LazyTensorStorage`."""
    return _CELL.sub(lambda cell: _CODE.sub(lambda code: _BETWEEN.sub("<wbr>", code[0]), cell[0]), html)
