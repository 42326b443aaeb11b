"""Loads the native extension by itself: these tests need numpy only, and run under sanitizers too.

The environment variable OSTINATO_TEST_NATIVE names a module file to test in place of the installed one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType


def load_file(path: str) -> ModuleType:
    """Load the module without its package, and so without torch."""
    spec = importlib.util.spec_from_file_location("_native", path)
    if spec is None or spec.loader is None:
        message = f"OSTINATO_TEST_NATIVE must name a compiled module, got {path!r}"
        raise ImportError(message)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The native extension; tests skip where it is switched off or missing."""
    path = os.environ.get("OSTINATO_TEST_NATIVE")
    if path:
        return load_file(path)
    backend = importlib.import_module("ostinato._backend").backend
    if backend.native is None:
        pytest.skip("the native extension is switched off or not installed")
    module: ModuleType = backend.native
    return module
