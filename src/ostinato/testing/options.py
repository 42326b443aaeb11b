"""Contract tests for the options of a class."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ostinato.errors import OstinatoError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["OptionContract"]

_WRONG: dict[str, tuple[Any, ...]] = {"int": ("4", 2.5), "float": ("x", float("nan")), "Literal": ("no such choice",)}


class OptionContract:
    """Requirements on the constructor of a class: each option that it cannot use raises an error with its name.

    What an option takes is read from the annotations: integers, numbers, and `Literal`.
    """

    kind: type[Any]
    arguments: Sequence[Any] = ()
    """Positional arguments without which the class cannot be made."""
    needed: Mapping[str, Any] = {}
    """Options without which the class cannot be made, or to which another option belongs."""

    def wrong_options(self) -> Iterator[tuple[str, Any]]:
        """Yield options and values that they must not take. Override it where one takes more than it declares."""
        for option in inspect.signature(self.kind).parameters.values():
            text = str(option.annotation)
            kinds = {"Literal" if "Literal[" in word else word for word in text.split(" | ")}
            if not any("device" in word for word in kinds):
                found = kinds & {"float" if "float" in kinds else "int", "Literal"}
                for value in (value for each in sorted(found) for value in _WRONG[each]):
                    if not (isinstance(value, str) and "str" in kinds):
                        yield option.name, value

    def test_wrong_options_are_named(self) -> None:
        """Each raises an error of Ostinato that names the option."""
        self.kind(*self.arguments, **self.needed)
        for name, value in self.wrong_options():
            try:
                self.kind(*self.arguments, **{**self.needed, name: value})
            except OstinatoError as error:
                if name not in str(error):
                    msg = f"{name}={value!r} raises without the name of the option: {error}"
                    raise AssertionError(msg) from error
            else:
                msg = f"{self.kind.__name__} takes {name}={value!r}"
                raise AssertionError(msg)
