"""The stub in git is the one that the extension generates."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="the stub describes the extension of Linux, which has all parts")
def test_the_stub_is_up_to_date(native):
    for tool in ("nanobind", "ruff"):
        pytest.importorskip(tool)
    from .stub import STUB, generate

    assert STUB.read_text(encoding="utf-8") == generate(native), "run `make stub`"
