"""The switch between the compiled part and torch alone.

What lives here: `native`, the compiled module or None. What does not: any use of it.
The environment variable OSTINATO_NATIVE decides: "0" switches the compiled part off, "1" requires it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["load_native", "native"]

_MISSING = (
    "ostinato runs without its compiled part: the results are the same, but sample() and extend() of CPU "
    "storages are several times slower. To get it, install a wheel of ostinato for this platform, or a C++20 "
    "compiler and run `pip install --force-reinstall --no-cache-dir --no-deps ostinato`. OSTINATO_NATIVE=0 "
    "accepts the slower path and silences this warning."
)


def load_native(setting: str | None) -> ModuleType | None:
    """Load the compiled part as the environment variable OSTINATO_NATIVE asks.

    Args:
        setting: Value of the variable: "0" for off, "1" for required, None (unset) for "if it is there".

    Returns:
        The module `ostinato._native`, or None: the caller then goes through torch.

    Raises:
        ImportError: `setting` is "1" and the compiled part is missing or does not load.
        OptionError: `setting` is any other value.
    """
    if setting not in {None, "0", "1"}:
        message = (
            f"environment variable OSTINATO_NATIVE must be 0 (off), 1 (required) or unset, got {setting!r}: "
            "unset it to use the compiled part where it is installed"
        )
        raise OptionError(message)
    if setting == "0":
        return None
    try:
        return importlib.import_module("ostinato._native")
    except ImportError as error:
        if setting == "1":
            message = (
                f"OSTINATO_NATIVE=1 requires the compiled part of ostinato, which did not load ({error}): "
                "install a wheel, or a C++20 compiler and ostinato from source, or unset the variable"
            )
            raise ImportError(message) from error
        warnings.warn(_MISSING, RuntimeWarning, stacklevel=2)
        return None


native: ModuleType | None = load_native(os.environ.get("OSTINATO_NATIVE"))
"""The compiled part, or None."""
