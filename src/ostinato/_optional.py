"""The only place where packages that may be missing are imported: late, and with what to install if they are."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from ostinato.errors import MissingExtraError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["require", "require_installed"]


def require(module: str, extra: str | None = None) -> ModuleType:
    """Import a package, or say what to install.

    Args:
        module: Dotted name to import, such as "matplotlib.pyplot".
        extra: The extra of ostinato that brings it, such as "viz"; None for one that ostinato depends on itself.

    Returns:
        The imported module (for a dotted name the last part, unlike `__import__`).

    Raises:
        MissingExtraError: The package is not installed. A package which is there but fails inside
            keeps its own error.

    Examples:
        >>> require("math", "viz").sqrt(4.0)
        2.0
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        wanted = package if extra is None else f"'ostinato[{extra}]'"
        message = f"{package} is needed here and is not installed: run pip install {wanted}"
        raise MissingExtraError(message) from error


def require_installed(package: str, extra: str, what: str, instead: str) -> None:
    """Check that a package is installed, without importing it: the import may take seconds.

    Args:
        package: Name of the package.
        extra: The extra of ostinato that brings it.
        what: What needs the package, the subject of the message.
        instead: What works without it.

    Raises:
        MissingExtraError: It is not installed.

    Example:
        >>> require_installed("math", "viz", "a plot", "print the numbers")
    """
    if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        message = f"{what} needs {package}, which is not installed: run pip install 'ostinato[{extra}]', or {instead}"
        raise MissingExtraError(message)
