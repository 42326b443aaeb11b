r"""Formulas as MathML, which browsers draw without scripts: `$..$` and `$$..$$` come as `\(..\)` and `\[..\]`."""

from __future__ import annotations

import html as escapes
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def to_mathml(html: str) -> str:
    """Return a page with every formula as MathML; its LaTeX is the label that screen readers get."""
    html = _BLOCK.sub(lambda found: f'<div class="formula">{_convert(found[1], "block")}</div>', html)
    return _INLINE.sub(lambda found: _convert(found[1], "inline"), html)


def _convert(text: str, display: str) -> str:
    latex = escapes.unescape(text).strip()
    return convert(latex, display=display)
