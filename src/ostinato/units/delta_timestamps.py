"""DeltaTimestamps: fields at several times around each row, as LeRobot's `delta_timestamps`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch

from ostinato.core.episodes.tracker import as_path
from ostinato.core.kinds import show_path
from ostinato.core.options import check_integer, check_real
from ostinato.core.records import Column, Request
from ostinato.errors import OptionError
from ostinato.units.base import SampleUnit, episodes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import Plan, View
    from ostinato.core.rows import Path

_TOLERANCE_S = 1e-4
_FARTHEST = 2**31
"""Larger offsets leave every episode: a buffer has at most `2**30` rows."""


_ANY = 2**200
"""Bound of offsets in rows, before they are cut to `_FARTHEST`."""
_SPARSE = 4
"""Offsets spread over more than this many rows for each offset are looked up one by one."""


class _Offsets(NamedTuple):
    """Steps from a row."""

    steps: Tensor
    """int64 `[T]`."""
    before: int
    """Rows before the row that a window over all of them and the row itself has."""
    after: int
    """Rows after it."""
    columns: Tensor | None
    """Positions of the steps in this window, int64 `[T]`; None for all of it in order."""


class _Field(NamedTuple):
    """A field that is read at offsets."""

    position: int
    """Position of its leaf in the schema."""
    offsets: _Offsets
    """Shared by fields with equal offsets."""
    pad: str | Path
    """The field of the batch that tells which of its rows are padding."""


_Seen: TypeAlias = "dict[tuple[int, int], tuple[Tensor, Tensor]]"


@final
class DeltaTimestamps(SampleUnit):
    """Reads fields at several times around each row drawn: past observations, a chunk of future actions.

    A listed field becomes `[B, T, *shape]`, with its `T` offsets in the order in which they were given; other fields
    stay as they are. Offsets may be negative, unsorted and repeated. Beyond the episode its first or last row is read,
    and a bool field `[B, T]` is True there: `action_is_pad` for `action`, `("next", "obs_is_pad")` for
    `("next", "obs")`. If rows of the episode were overwritten, its first row present counts as the first one.

    The rows read and the masks are those of `LeRobotDataset(delta_timestamps=...)`, whose keys with dots are names, not
    paths. One offset alone keeps its dimension `T = 1`, also for images, where LeRobot leaves it out.

    In prioritized buffers weights and priorities are those of the row drawn. After a `SequenceUnit` and in slices each
    row of a window is such a row, and offsets may leave the window, but not the episode. After an `NStep` the fields
    that it reads from a later row are read at offsets from that row.

    Args:
        delta_timestamps: for each field, a string or the path of a nested one, its offsets in seconds, multiples of
            `1 / fps`.
        fps: rows per second, such as the `fps` of a dataset.
        steps: for each field its offsets in rows, instead of `delta_timestamps` and `fps`.
        tolerance_s: seconds by which an offset may differ from a multiple of `1 / fps`, at least 0.
        done_key: field that ends episodes; None: the buffer's `episodes`, or the usual flags.

    Raises:
        OptionError: for no fields or a field without offsets, offsets that are not finite or off the frame rate, or
            arguments that do not go together; in a sample, for a field that another unit computes.

    Examples:
        >>> import torch
        >>> from ostinato import DeltaTimestamps, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(3),
        ...     sampler=SamplerWithoutReplacement(shuffle=False),
        ...     sample_unit=DeltaTimestamps({"observation.state": [-0.1, 0.0], "action": [0.0, 0.1]}, fps=10),
        ...     batch_size=3,
        ... )
        >>> action = torch.tensor([5, 6, 7])
        >>> _ = rb.extend({"observation.state": torch.arange(3), "action": action, "done": action == 7})
        >>> batch = rb.sample()
        >>> batch["observation.state"].tolist(), batch["action"].tolist()
        ([[0, 0], [0, 1], [1, 2]], [[5, 6], [6, 7], [7, 7]])
        >>> batch["action_is_pad"].tolist()
        [[False, False], [False, False], [False, True]]
    """

    offsets: dict[Path, tuple[int, ...]]
    """Steps from the row, by path of the field."""
    options = ("offsets",)
    rank = 4

    def __init__(
        self,
        delta_timestamps: Mapping[Any, Iterable[float]] | None = None,
        *,
        fps: float | None = None,
        steps: Mapping[Any, Iterable[int]] | None = None,
        tolerance_s: float = _TOLERANCE_S,
        done_key: Key | None = None,
    ) -> None:
        if (delta_timestamps is None) == (steps is None):
            msg = (
                "give either delta_timestamps, offsets in seconds, with fps, or steps, offsets in rows; got "
                f"{'neither' if steps is None else 'both'}"
            )
            raise OptionError(msg)
        if delta_timestamps is None:
            if fps is not None or tolerance_s != _TOLERANCE_S:
                msg = f"steps are rows: leave out fps and tolerance_s, got fps={fps!r}, tolerance_s={tolerance_s!r}"
                raise OptionError(msg)
            self.offsets = _listed(
                "steps", steps, lambda name, value: check_integer(name, value, None, OptionError, below=_ANY)
            )
        else:
            if fps is None:
                msg = (
                    "the first argument, delta_timestamps, holds offsets in seconds, and needs fps=, the rows per "
                    "second of the data. For offsets in rows, give steps=: DeltaTimestamps(steps={'action': range(16)})"
                )
                raise OptionError(msg)
            rate = check_real("fps", fps, 1 / _FARTHEST, _FARTHEST)
            tolerance = check_real("tolerance_s", tolerance_s, 0, _FARTHEST)
            self.offsets = _listed("delta_timestamps", delta_timestamps, partial(_rows_of, rate, tolerance))
        self.episodes = episodes_of(done_key)

    def __repr__(self) -> str:
        """Offsets in rows."""
        steps = {path[0] if len(path) == 1 else path: list(offsets) for path, offsets in self.offsets.items()}
        return f"DeltaTimestamps(steps={steps})"

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Read the fields at their offsets."""
        fields: list[_Field] = self._fields(plan)
        plan.require_read(*(field.position for field in fields))
        table, columns, added = view.require_episodes(), dict(plan.changed), dict(plan.fields)
        seen: _Seen = {}
        for position, offsets, pad in fields:
            slots = plan.slots_of(position)
            place = (id(slots), id(offsets))
            if place not in seen:
                seen[place] = _read_at(table, slots, offsets)
            rows, padded = seen[place]
            columns[position] = Column(Request(position, rows), (offsets.steps.shape[0],))
            added[pad] = padded.clone()  # fields of a batch share no memory
        return plan._replace(changed=columns, fields=added)

    def _find(self, plan: Plan) -> list[_Field]:
        """Return the fields for the rows' schema."""
        shared = {offsets: _offsets(offsets, plan.records.device) for offsets in set(self.offsets.values())}
        found = []
        for path, offsets in self.offsets.items():
            *parents, last = path
            pad = (*parents, f"{last}_is_pad")
            plan.require_absent(pad)
            position = plan.require(path, "to be read at offsets")
            found.append(_Field(position, shared[offsets], pad if parents else f"{last}_is_pad"))
        return found


def _offsets(steps: tuple[int, ...], device: torch.device) -> _Offsets:
    before, after = -min(0, *steps), max(0, *steps)
    columns = None
    if len(steps) != before + after + 1 or steps != tuple(range(-before, after + 1)):
        columns = torch.tensor([step + before for step in steps], dtype=torch.int64, device=device)
    return _Offsets(torch.tensor(steps, dtype=torch.int64, device=device), before, after, columns)


def _read_at(table: EpisodeTable, slots: Tensor, offsets: _Offsets) -> tuple[Tensor, Tensor]:
    """Return the slots of rows at offsets from other rows, int64 `[n * T]`, and where they are padding, bool `[n, T]`.

    A row of no episode is read itself, whatever the offset.
    """
    steps, before, after, columns = offsets
    if before + after < _SPARSE * steps.shape[0]:
        rows, valid = table.window(slots, before, after)
        if columns is not None:
            rows, valid = rows.index_select(1, columns), valid.index_select(1, columns)
        return rows.view(-1), valid.logical_not_()
    rows = table.shift(slots.repeat_interleave(steps.shape[0]), steps.repeat(slots.shape[0]))
    ahead, behind = table.ahead(slots).clamp_(min=0), table.behind(slots).clamp_(min=0)
    return rows, (steps > ahead[:, None]) | (steps < -behind[:, None])


# -- arguments -------------------------------------------------------------------------------------------------------


def _listed(name: str, given: Any, read: Callable[[str, Any], int]) -> dict[Path, tuple[int, ...]]:
    """Return the offsets of each field in rows, by path; `read` makes one of what was given."""
    if not isinstance(given, Mapping) or not given:
        msg = f"{name} must name at least one field with its offsets, as in {{'action': [0, 1]}}, got {given!r}"
        raise OptionError(msg)
    found: dict[Path, tuple[int, ...]] = {}
    for key, offsets in given.items():
        path = as_path(key)
        if path in found:
            msg = f"{name} names {show_path(path)} twice: leave one out"
            raise OptionError(msg)
        place = f"{name} of {show_path(path)}"
        if (
            isinstance(offsets, str | bytes | Mapping)
            or not isinstance(offsets, Iterable)
            or not (listed := list(offsets))
        ):
            msg = f"{place} must be a list of numbers, at least one, got {offsets!r}: or leave the field out"
            raise OptionError(msg)
        found[path] = tuple(max(-_FARTHEST, min(read(place, value), _FARTHEST)) for value in listed)
    return found


def _rows_of(fps: float, tolerance_s: float, place: str, value: Any) -> int:
    """Return an offset in seconds as steps."""
    seconds = check_real(place, value, -_FARTHEST, _FARTHEST)
    steps = round(seconds * fps)
    if abs(seconds * fps - steps) / fps > tolerance_s:
        msg = (
            f"{place}: {seconds:g} s is no multiple of 1/fps = {1 / fps:g} s; the closest one is {steps / fps:g} s. "
            f"Change it, or raise tolerance_s={tolerance_s:g}"
        )
        raise OptionError(msg)
    return steps
