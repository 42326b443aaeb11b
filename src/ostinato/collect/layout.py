"""Where the parts of a step stand in a row, and how they are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core import kinds
from ostinato.core.episodes.keys import as_path
from ostinato.errors import OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ostinato.core.episodes.keys import Key
    from ostinato.core.rows import Path

__all__ = ["Layout", "join"]

_FLAT: dict[str, Path] = {
    "obs": ("obs",),
    "action": ("action",),
    "reward": ("reward",),
    "next_obs": ("next_obs",),
    "terminated": ("terminated",),
    "truncated": ("truncated",),
    "env": ("env",),
    "mask": ("mask",),
}
_TED: dict[str, Path] = {
    "obs": ("observation",),
    "action": ("action",),
    "reward": ("next", "reward"),
    "next_obs": ("next", "observation"),
    "terminated": ("next", "terminated"),
    "truncated": ("next", "truncated"),
    "done": ("next", "done"),
    "env": ("env",),
    "mask": ("mask",),
}
_LAYOUTS = {"flat": _FLAT, "ted": _TED}


@final
class Layout:
    """The fields of a row: `flat` (`obs`, ..., `next_obs`) or `ted` (`observation`, ..., `("next", ...)`).

    Args:
        name: "flat" or "ted".
        keys: other names for some parts.

    Raises:
        OptionError: for a layout or a part that there is not, or one name for two parts.
    """

    def __init__(self, name: str, keys: Mapping[str, Key] | None) -> None:
        if name not in _LAYOUTS:
            msg = f"layout must be one of {sorted(_LAYOUTS)}, got {name!r}"
            raise OptionError(msg)
        usual, given = _LAYOUTS[name], dict(keys or {})
        unknown = sorted(set(given) - set(usual))
        if unknown:
            msg = f"keys names parts of a step, {list(usual)} in layout {name!r}, got {unknown}"
            raise OptionError(msg)
        self.ted = name == "ted"
        self.paths: dict[str, Path] = {**usual, **{part: as_path(key) for part, key in given.items()}}
        self._obs_named = bool({"obs", "next_obs"} & set(given))
        if len(set(self.paths.values())) < len(self.paths):
            msg = f"each part of a step needs a name of its own, got {self.paths}"
            raise OptionError(msg)

    def __getitem__(self, part: str) -> Path:
        """Return the path of a part."""
        return self.paths[part]

    def flags(self, ends: Mapping[str, Tensor]) -> dict[Path, Tensor]:
        """Return the fields that say how a step ended, from the flags `terminated` and `truncated`, `[n]`."""
        shown = {**ends, "done": ends["terminated"] | ends["truncated"]} if "done" in self.paths else ends
        return {self.paths[part]: self.column(value) for part, value in shown.items()}

    def column(self, values: Tensor) -> Tensor:
        """Give one number per row the shape that it has in this layout: `[n]`, or `[n, 1]` with `ted`."""
        return values[:, None] if self.ted else values

    def observation(self, parts: Mapping[Path, Tensor], *, after: bool) -> dict[Path, Tensor]:
        """Return the fields of an observation: each entry of a dict is a field of its own.

        Raises:
            OptionError: if observations are dicts, and their parts were given one name.
        """
        if () in parts:
            return {self.paths["next_obs" if after else "obs"]: parts[()]}
        if self._obs_named:
            msg = "each entry of a dict observation is a field under its own name: leave obs and next_obs out of keys"
            raise OptionError(msg)
        return {(self._after(path) if after else path): value for path, value in parts.items()}

    def _after(self, path: Path) -> Path:
        return ("next", *path) if self.ted else (*path[:-1], f"next_{path[-1]}")

    def known(self, *, env: bool, mask: bool) -> set[Path]:
        """Return the fields that rows have, but for observations."""
        unsaid = {"obs", "next_obs"} | (set() if env else {"env"}) | (set() if mask else {"mask"})
        return {path for part, path in self.paths.items() if part not in unsaid}

    def rows(self, fields: Mapping[Path, Tensor], count: int, *, collection: bool) -> Any:
        """Put the fields of rows, `[count, ...]`, together: a dict, or a TensorDict."""
        if not collection:
            return kinds.with_fields({}, fields)  # type: ignore[arg-type]
        empty = kinds.make(kinds.Node("tensordict", ()), [], (count,), torch.device("cpu"))
        return kinds.with_fields(empty, fields)  # type: ignore[arg-type]


def join(groups: list[dict[Path, Tensor]]) -> dict[Path, Tensor]:
    """Join the fields of a row.

    Raises:
        SchemaError: if two of them have one name.
    """
    out: dict[Path, Tensor] = {}
    for group in groups:
        twice = sorted(kinds.show_path(path) for path in out.keys() & group.keys())
        if twice:
            msg = f"two parts of a step are called {', '.join(twice)}: give one of them another name with keys"
            raise SchemaError(msg)
        out |= group
    return out
