"""What all slice samplers share: how many slices of what length, where they may begin, and the flags at their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.core import kinds
from ostinato.core.boundaries import Episodes, as_path
from ostinato.core.draw import episodes_of
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.boundaries import Key
    from ostinato.core.draw import View
    from ostinato.core.episodes import EpisodeTable
    from ostinato.core.plan import Plan
    from ostinato.core.rows import Path

__all__ = [
    "TOP",
    "SliceOptions",
    "Slicing",
    "check_ignored",
    "slice_episodes",
]

TOP = 2**63 - 1
"""Random numbers for exact draws are uniform below this."""
_TRAJ_KEYS = (("collector", "traj_ids"), ("episode",))


class SliceOptions(NamedTuple):
    """The options of a slice, as TorchRL names them."""

    num_slices: int | None
    slice_len: int | None
    truncated_key: Key | None
    init_key: Key | None
    strict_length: bool
    pad_output: bool
    span: Any


def slice_episodes(
    end_key: Key | None,
    end_keys: Sequence[Key] | None,
    traj_key: Key | None,
    ends: Tensor | None,
    trajectories: Tensor | None,
    *,
    cache_values: bool,
) -> Episodes:
    """Return where episodes end, from the arguments of a slice sampler.

    Raises:
        UsageError: if they exclude each other.
    """
    if end_key is not None and end_keys is not None:
        msg = "end_key and end_keys exclude each other: give one of them"
        raise UsageError(msg)
    if ends is not None or trajectories is not None:
        given = {
            "ends": ends,
            "trajectories": trajectories,
            "end_key": end_key,
            "end_keys": end_keys,
            "traj_key": traj_key,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            msg = f"{' and '.join(names)} exclude each other: give one tensor, or keys"
            raise UsageError(msg)
        if not cache_values:
            msg = f"{names[0]} needs cache_values=True: it describes rows that stay as they are"
            raise UsageError(msg)
        return Episodes(ends=ends, trajectories=trajectories)
    if end_keys is not None:
        return Episodes(list(end_keys), traj_key, optional=True)
    if end_key is None and traj_key is None:
        return Episodes(None, list(_TRAJ_KEYS), optional=True)
    return Episodes(end_key, traj_key)


def check_ignored(*, compiled: Any, use_gpu: Any = False, fragmented: Any = False) -> None:
    """Refuse options that would be ignored.

    Raises:
        OptionError: naming them.
    """
    if compiled or use_gpu:
        msg = (
            "compile= and use_gpu= are there to speed up the search for episodes, which is not needed here: "
            "leave them out"
        )
        raise OptionError(msg)
    if fragmented:
        msg = (
            "fragmented= sorts rows by a step number, which is not needed here: with traj_key= interleaved rows of one "
            "id are one episode, in the order in which they were written; leave it out"
        )
        raise OptionError(msg)


@final
class Slicing:
    """Slices of episodes: their number and length, the rows at which they begin, the flags that they add."""

    def __init__(self, options: SliceOptions) -> None:
        if (options.num_slices is None) == (options.slice_len is None):
            msg = (
                f"give either num_slices or slice_len, got num_slices={options.num_slices} and "
                f"slice_len={options.slice_len}"
            )
            raise KindError(msg)
        for name in ("num_slices", "slice_len"):
            value = getattr(options, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                msg = f"{name} must be an integer of at least 1, got {value!r}"
                raise OptionError(msg)
        if options.pad_output and options.strict_length:
            msg = "pad_output=True needs strict_length=False: only shorter slices are padded"
            raise OptionError(msg)
        self.options = options
        span = options.span if isinstance(options.span, tuple) else (options.span, options.span)
        self.left, self.right = (_side(side, options.slice_len) for side in span)
        self._truncated = None if options.truncated_key is None else as_path(options.truncated_key)
        self._init = None if options.init_key is None else as_path(options.init_key)
        self._ends: tuple[Any, Tensor] = (None, torch.empty(0, dtype=torch.bool, device="cpu"))

    @property
    def form(self) -> str:
        """What slices look like, as states hold it."""
        options = self.options
        names = ("num_slices", "slice_len", "strict_length", "pad_output")
        said = [f"{name}={getattr(options, name)}" for name in names]
        return ", ".join([*said, f"span={(self.left, self.right)}"])

    def check_form(self, state: dict[str, Any]) -> None:
        """Refuse a state of other slices.

        Raises:
            CheckpointError: naming both.
        """
        if state["slices"] != self.form:
            msg = f"the state is that of slices with {state['slices']}, these have {self.form}: use the same options"
            raise CheckpointError(msg)

    def split(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices in a batch, and their length.

        Raises:
            UsageError: if the batch size is no multiple.
        """
        number, length = self.options.num_slices, self.options.slice_len
        part = length if number is None else number
        if part is None or batch_size % part:
            name = "slice_len" if number is None else "num_slices"
            msg = f"batch_size must be a multiple of {name}={part}, got {batch_size}"
            raise UsageError(msg)
        return (batch_size // part, part) if number is None else (part, batch_size // part)

    @property
    def plain(self) -> bool:
        """Whether all slices have full length, and begin where their episode has so many rows left."""
        return self.options.strict_length and not self.left and not self.right

    def need(self, length: int) -> int:
        """Return the rows that an episode must have to be drawn."""
        return length if self.options.strict_length else 1

    def least(self, length: int) -> int:
        """Return the rows that a slice has at least, in an episode that has so many."""
        return 1 if self.right is True else max(1, length - int(self.right))

    def require(self, rows: int, length: int, table: EpisodeTable) -> None:
        """Raise if no episode is long enough.

        Raises:
            EmptyBufferError: naming the length, and the longest episode.
        """
        if rows == 0:
            longest = int(table.episodes().rows.max()) if table.count else 0
            msg = (
                f"no episode of the {table.rows} rows has the {length} rows of a slice (the longest has {longest}): "
                "add longer episodes, shorten the slices, or allow shorter ones with strict_length=False"
            )
            raise EmptyBufferError(msg)

    def place(self, rows: Tensor, length: int, view: View, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Place one slice in the episode of each row: its first slot, and its length, int64 `[n]` each.

        The start is uniform over those that the options allow: `[0, n - L]` of an episode of `n` rows, or without
        `strict_length` of an episode of `n < L` rows all of it; `span` lets a slice reach out of its episode on a side,
        which makes it shorter.
        """
        table = episodes_of(view)
        behind = table.behind(rows)
        have = table.ahead(rows) + behind + 1
        full = have.clamp(max=length)
        low = -torch.minimum(_reach(self.left, length), full - 1)
        high = have - full + torch.minimum(_reach(self.right, length), full - 1)
        randoms = torch.randint(0, TOP, rows.shape, generator=generator, device=view.device)
        start = low + _scaled(randoms, high - low + 1)
        first = start.clamp(min=0)
        return table.shift(rows, first - behind), torch.minimum(start + full, have) - first

    def _last(self, plan: Plan) -> Tensor:
        """Return which records end their slice; of slices of one length a copy of the last answer."""
        if plan.last is not None or plan.owner is not None:
            return plan.last_of_each()
        key = (plan.records.shape, plan.repeat, plan.records.device)
        if self._ends[0] != key:
            self._ends = (key, plan.last_of_each())
        return self._ends[1].clone()

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:
        """Return the flags of slices: the last row truncated and done, the first one initial where rows say so."""
        out: dict[Path, Tensor] = {}
        last = self._last(plan)
        path = self._truncated
        if path is not None:
            done, terminated = (*path[:-1], "done"), (*path[:-1], "terminated")
            flags = last[:, None]
            stored = kinds.find_field(data, done)
            held = kinds.find_field(data, terminated)
            out[path] = flags if stored is None else _like(last, stored)
            out[done] = flags.clone() if stored is None else _with(stored, last)
            out[terminated] = torch.zeros_like(flags) if held is None else held.clone()
        initial = None if self._init is None else kinds.find_field(data, self._init)
        if initial is not None and self._init is not None:
            out[self._init] = _with(initial, plan.first_of_each())
        return out


def _side(side: Any, length: int | None) -> bool | int:
    if isinstance(side, bool):
        return side
    if not isinstance(side, int) or side < 0 or (length is not None and side >= length):
        msg = f"span is True, False or a number of rows below the slice length, per side, got {side!r}"
        raise OptionError(msg)
    return side


def _reach(side: bool | int, length: int) -> Tensor:  # noqa: FBT001
    """Rows by which a slice may reach out of its episode."""
    last = length - 1 if side is True else min(int(side), length - 1)
    return torch.tensor(last, dtype=torch.int64, device="cpu")


def _scaled(randoms: Tensor, counts: Tensor) -> Tensor:
    """Bring random numbers below 2**63 to `[0, count)`."""
    return ((randoms >> 10).to(torch.float64) * 2.0**-53 * counts).to(torch.int64).clamp_(max=counts - 1)


def _like(flags: Tensor, stored: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (stored.ndim - 1)).expand_as(stored).clone()


def _with(stored: Tensor, flags: Tensor) -> Tensor:
    """Stored flags, of whatever dtype, and more that are True."""
    return torch.where(flags.view(-1, *[1] * (stored.ndim - 1)), torch.ones_like(stored), stored)
