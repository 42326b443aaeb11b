"""The flat layout of episodes: TED2Flat stores each observation once, Flat2TED gives rows with `next` back.

Rows come in TED form: fields at the root, and under `next` what followed them, with done flags and rewards under `next`
alone. An observation under `next` is that of the row that follows, except at ends, so the flat layout keeps the
observations of an episode in one line with the last one behind them: `rows + ends` of them. What lives here: two pure
conversions, on whatever device the rows are. What does not: the order of cells (`ted_rows.py`), files, and when to
convert (`buffers/hooks.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.bits import as_bits
from ostinato.core.kinds import show_path
from ostinato.durable.ted_rows import (
    BARE,
    NOT_FLAT,
    SHAPE,
    Keys,
    Line,
    Rows,
    as_path,
    collection,
    fill,
    read_note,
    read_notes,
    tensors_of,
)
from ostinato.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.ted_rows import Field, Key

__all__ = ["Flat2TED", "TED2Flat"]

_FLAGS = ("done", "truncated", "terminated")
_REWARDS = ("reward",)


@final
class TED2Flat:
    """A hook for saving: turns rows in TED form into the flat layout, which stores each observation once.

    Of each observation field there are `rows + ends` values, every other field has `rows`; flags and rewards are those
    of `next`, without `next`. A ring is unrolled, so that rows lie in the order of time; with time x environments the
    environments follow one another. Rows that the layout would not give back are refused: an observation under `next`
    that is not the one of the following row in the middle of an episode (as after n-step sums), flags at the root that
    are set.

    Memory: that of the flat layout. Storages set `shift` and `is_full` before they call the hook; without them all rows
    are there, in the order of time. A hook serves one storage at a time.

    Args:
        done_key: flag that ends an episode, bool `[*batch]` or `[*batch, 1]`.
        shift_key: where `shift` is kept.
        is_full_key: where `is_full` is kept.
        done_keys: flags, without `next`.
        reward_keys: rewards, without `next`.

    Raises:
        OptionError: if `done_keys` or `reward_keys` are text instead of a tuple.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import Flat2TED, TED2Flat
        >>> steps = torch.arange(4.0)
        >>> ends = torch.tensor([False, True, False, True])
        >>> rows = TensorDict({"obs": steps, "next": {"obs": steps + 1, "done": ends}}, [4])
        >>> rows["next", "obs"][ends] = -1.0
        >>> flat = TED2Flat()(rows)
        >>> flat["obs"]
        tensor([ 0.,  1., -1.,  2.,  3., -1.])
        >>> bool((Flat2TED()(flat) == rows).all())
        True
    """

    shift: int | None
    """Step after the newest one: where the ring is cut."""
    is_full: bool | None
    """Whether all steps of the data were written; else those before `shift`."""

    def __init__(
        self,
        done_key: Key = ("next", "done"),
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
        done_keys: Iterable[Key] = _FLAGS,
        reward_keys: Iterable[Key] = _REWARDS,
    ) -> None:
        self._keys = Keys.of(done_key, shift_key, is_full_key, done_keys, reward_keys)
        self.shift = self.is_full = None

    def __call__(self, data: Any, path: str | Path | None = None) -> Any:
        """Convert rows.

        Args:
            data: TensorDict `[steps, ...]` or `[steps, *environments, ...]`, or a dict of such tensors.
            path: a directory to put the result into, memory-mapped by tensordict; None keeps it in memory.

        Returns:
            A TensorDict without batch dimensions. Copy.

        Raises:
            CheckpointError: for rows that the flat layout would not give back, naming the field.
            KeyMissingError: if a field that is needed is not there.
        """
        rows = Rows.read(data, self._keys)
        steps = rows.shape[0]
        shift = steps if self.shift is None else int(self.shift)
        full = self.is_full is None or bool(self.is_full)
        if not 0 <= shift <= steps or (not full and shift == 0):
            msg = f"shift must be in [{0 if full else 1}, {steps}] (steps of the data), got {shift}"
            raise OptionError(msg)
        line = Line.of(rows.shape, shift, full=full, device=rows.done.device)
        ends = line.lay(rows.done).view(line.lanes, steps)
        ends[:, -1 if full else shift - 1] = True
        ends = ends.flatten()
        line.check(rows, ends, self._keys)
        first = torch.arange(ends.shape[0], device=ends.device) + ends.cumsum(0) - ends.long()
        last = first[ends] + 1
        out: dict[Field, Tensor] = {}
        for key in rows.fields():
            if key not in rows.twice:
                out[key] = line.lay(rows.next[key] if key in self._keys.flags | self._keys.rewards else rows.root[key])
                continue
            now, then = line.lay(rows.root[key]), line.lay(rows.next[key])
            out[key] = now.new_empty((now.shape[0] + last.shape[0], *now.shape[1:]))
            as_bits(out[key])[first] = as_bits(now)
            as_bits(out[key])[last] = as_bits(then)[ends]
        notes: dict[Field, Any] = {self._keys.is_full: full, self._keys.shift: shift, (SHAPE,): tuple(rows.shape)}
        bare = [list(key) for key in rows.next if key in self._keys.flags and key not in rows.root]
        result = collection(out, notes | ({(BARE,): bare} if bare else {}), ends.device)
        return result if path is None else result.memmap_(path)


@final
class Flat2TED:
    """A hook for loading: the inverse of `TED2Flat`.

    Args:
        done_key: flag that ends an episode, in the flat layout.
        shift_key: where `shift` is kept.
        is_full_key: where `is_full` is kept.
        done_keys: flags; rows get them under `next`, and zeros at the root, unless the rows saved had none there.
        reward_keys: rewards; rows get them under `next`.

    Raises:
        OptionError: if `done_keys` or `reward_keys` are text instead of a tuple.

    Example:
        See `TED2Flat`.
    """

    def __init__(
        self,
        done_key: Key = "done",
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
        done_keys: Iterable[Key] = _FLAGS,
        reward_keys: Iterable[Key] = _REWARDS,
    ) -> None:
        self._keys = Keys.of(done_key, shift_key, is_full_key, done_keys, reward_keys)

    def __call__(self, data: Any, out: Any = None) -> Any:
        """Convert the flat layout back to rows; of steps that were never written observations are zeros.

        Args:
            data: what `TED2Flat` returned.
            out: TensorDict to write the rows into; None makes one.

        Returns:
            A TensorDict `[steps]` or `[steps, *environments]`, the ring as it was. Copy.

        Raises:
            CheckpointError: if `data` does not come from `TED2Flat` with the same keys, or is damaged.
        """
        fields = dict(tensors_of(data))
        shape, shift, full = read_notes(data, self._keys)
        line = Line.of(
            shape, shift, full=full, device=next(iter(fields.values())).device if fields else torch.device("cpu")
        )
        cells = line.lanes * shape[0]
        ends = fields.get(self._keys.done)
        if ends is None or ends.numel() != cells:
            got = "nothing" if ends is None else f"shape {list(ends.shape)}"
            msg = f"the flat layout must hold {cells} flags {show_path(self._keys.done)}, got {got}: {NOT_FLAT}"
            raise CheckpointError(msg)
        ends = ends.detach().bool().reshape(line.lanes, shape[0]).clone()
        ends[:, -1 if full else shift - 1] = True
        ends = ends.flatten()
        first = torch.arange(cells, device=ends.device) + ends.cumsum(0) - ends.long()
        written = line.written()
        bare = {as_path(key) for key in read_note(data, (BARE,)) or ()}
        rows: dict[Field, Tensor] = {}
        for key, value in fields.items():
            if value.ndim and value.shape[0] == cells:
                kept = line.spread(value, None)
                if key in self._keys.flags and key not in bare:
                    rows[key] = torch.zeros_like(kept)
                rows[("next", *key) if key in self._keys.flags | self._keys.rewards else key] = kept
            elif value.ndim and value.shape[0] == cells + int(ends.sum()):
                rows[key] = line.spread(value, first, written)
                rows[("next", *key)] = line.spread(value, first + 1, written)
            else:
                many = f"{cells} or {cells + int(ends.sum())}"
                msg = f"field {show_path(key)} must hold {many} values, got shape {list(value.shape)}: {NOT_FLAT}"
                raise CheckpointError(msg)
        return collection(rows, {}, ends.device, shape) if out is None else fill(out, rows)
