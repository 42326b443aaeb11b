"""Slice samplers: pieces of episodes, drawn episode by episode."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import torch

from ostinato.core import kinds
from ostinato.core.episodes.keys import Episodes, as_path
from ostinato.core.records import Draw, episodes_of
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, UsageError
from ostinato.samplers.base import Sampler
from ostinato.samplers.prioritized import PrioritizedSampler
from ostinato.samplers.uniform import SamplerWithoutReplacement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.episodes.keys import Key
    from ostinato.core.episodes.table import EpisodeTable, Starts
    from ostinato.core.records import Plan, View
    from ostinato.core.rows import Path

__all__ = [
    "TOP",
    "PrioritizedSliceSampler",
    "SliceOptions",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
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


class SliceSampler(Sampler):
    """Draws slices of episodes: an episode uniformly among those that are long enough, then a start uniformly in it.

    A batch of `num_slices` slices of `slice_len` rows each comes flat, `[num_slices * slice_len, *shape]`. No slice
    spans two episodes, nor the write cursor, and every start that leaves room for a slice can be drawn. With
    interleaved rows of several episodes (`traj_key`) a slice follows its own.

    The batch's flags: the last row of each slice is True under `truncated_key` and under `done` beside it, other
    `done` and all `terminated` flags are those stored; `init_key`, where rows have it, is True on the first row of each
    slice. They stand in the info of a sample and in TensorDict samples.

    Cost: O(slices), whatever the size of the buffer.

    Args:
        num_slices: slices in a batch; their length is `batch_size // num_slices`. Exclusive with `slice_len`.
        slice_len: rows of a slice; a batch has `batch_size // slice_len` of them.
        end_key: field that ends episodes. Without this and `traj_key`, `("collector", "traj_ids")` or `episode` are
            taken where rows have them, and with them or alone the usual flags (see `Episodes`).
        end_keys: several of them: any one ends an episode; those that rows lack are left out.
        traj_key: field with the id of a row's episode.
        step_key: no effect: the order of writing is the order of steps.
        fragmented: must be False: `traj_key` tells interleaved episodes apart.
        ends: bool `[rows]` for rows that stay as they are; needs `cache_values=True`.
        trajectories: ids `[rows]`, likewise.
        cache_values: no effect but to allow these two: boundaries are noted when rows are written, never searched for.
        truncated_key: see above; None adds no flags.
        init_key: see above; None leaves the stored flags alone.
        strict_length: False lets an episode shorter than a slice be drawn too, whole.
        pad_output: repeat the last row of shorter slices; the mask `("collector", "mask")` is False there.
        span: let slices reach out of their episode on the left and the right, which makes them shorter: True down to
            one row, a number by so many rows; a pair for each side.
        compile: must be False; there is nothing to compile.
        use_gpu: must be False, likewise.
        replacement: False makes a `SliceSamplerWithoutReplacement` instead.

    Raises:
        KindError: if not exactly one of `num_slices` and `slice_len` is given.
        UsageError: if ways to tell the episodes exclude each other.
        OptionError: for other options that exclude each other, or are out of range.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, SliceSampler
        >>> sampler = SliceSampler(slice_len=3, end_key="done")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
        >>> done = torch.zeros(20, dtype=torch.bool)
        >>> done[[6, 13, 19]] = True
        >>> _ = rb.extend({"step": torch.arange(20), "done": done})
        >>> steps = rb.sample()["step"].view(2, 3)
        >>> bool((steps.diff() == 1).all())
        True
    """

    slices = True

    def __new__(cls, *args: Any, replacement: bool = True, **kwargs: Any) -> Self:  # noqa: ARG004
        """Make the sampler that `replacement` asks for."""
        made = cls if replacement or cls is not SliceSampler else SliceSamplerWithoutReplacement
        return object.__new__(made)  # type: ignore[return-value]

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        step_key: Key | None = "step_count",  # noqa: ARG002
        fragmented: bool = False,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: bool | torch.device = False,
        replacement: bool = True,
    ) -> None:
        del replacement  # read by __new__
        check_ignored(compiled=compile, use_gpu=use_gpu, fragmented=fragmented)
        self._slicing = Slicing(
            SliceOptions(num_slices, slice_len, truncated_key, init_key, strict_length, pad_output, span)
        )
        self.episodes = slice_episodes(end_key, end_keys, traj_key, ends, trajectories, cache_values=cache_values)
        self.span = 1 if slice_len is None or not strict_length else slice_len

    def __repr__(self) -> str:
        """Options."""
        options = self._slicing.options
        return (
            f"{type(self).__name__}(num_slices={options.num_slices}, slice_len={options.slice_len}, {self.episodes!r}, "
            f"strict_length={options.strict_length})"
        )

    @property
    def num_slices(self) -> int | None:
        """Slices in a batch, if that is fixed."""
        return self._slicing.options.num_slices

    @property
    def slice_len(self) -> int | None:
        """Rows of a slice, if that is fixed."""
        return self._slicing.options.slice_len

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
        """
        length, table = self._slicing.split(batch_size)[1], episodes_of(view)
        self._slicing.require(table.starts(self._slicing.need(length)).rows, length, table)

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slices: their first rows and their lengths.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
        """
        slicing = self._slicing
        number, length = slicing.split(batch_size)
        table = episodes_of(view)
        starts = table.starts(slicing.need(length))
        slicing.require(starts.rows, length, table)
        randoms = torch.randint(0, TOP, (2 * number,), generator=generator, device=view.device)
        rows = starts.draw_episodes(randoms)
        if slicing.plain:
            return Draw(rows, length=length)
        first, lengths = slicing.place(rows, length, view, generator)
        return Draw(first, lengths=lengths, pad=length if slicing.options.pad_output else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what slices look like."""
        return {"slices": self._slicing.form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: ARG002
        """Compare with what `state_dict` returned.

        Raises:
            CheckpointError: if the state is that of other slices.
        """
        self._slicing.check_form(state)

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the state as it is: it names no slots."""
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with what `state_dict` returned; see `check_state`."""
        self._slicing.check_form(state)

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:
        """Return the flags of the slices; see the class."""
        return self._slicing.marks(plan, data)


@final
class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices so that within one pass every episode that is long enough is drawn exactly once.

    The start within the episode is uniform. Writing to the buffer begins a new pass, and so does
    a batch with slices of another length (`num_slices`). The last batch of a pass has what is
    left, unless `drop_last`. An instance of both classes, as TorchRL's is.

    Args:
        num_slices: see `SliceSampler`, also for the arguments not listed here; slices neither span nor are padded.
        drop_last: leave out the last batch of a pass where it has fewer slices.
        shuffle: False goes through the episodes by age.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend({"episode": torch.arange(12) // 4})
        >>> [len(batch["episode"]) for batch in rb]
        [4, 2]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        use_gpu: bool | torch.device = False,
        replacement: bool = False,
    ) -> None:
        if replacement:
            msg = "SliceSamplerWithoutReplacement draws without replacement, got replacement=True: use SliceSampler"
            raise OptionError(msg)
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            compile=compile,
            use_gpu=use_gpu,
        )
        SamplerWithoutReplacement.__init__(self, drop_last=drop_last, shuffle=shuffle)
        self._firsts = torch.empty(0, dtype=torch.int64, device="cpu")
        self._seen, self._length = -1, 0

    def __repr__(self) -> str:
        """Options and place in the pass."""
        return f"{SliceSampler.__repr__(self)[:-1]}, drawn={self._at} of {self._firsts.shape[0]} episodes)"

    def restart(self) -> None:
        """Begin a new pass with the next draw."""
        SamplerWithoutReplacement.restart(self)
        self._seen = -1

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw the next slices of the pass.

        Raises:
            EmptyBufferError: if no episode is long enough.
        """
        slicing = self._slicing
        number, length = slicing.split(batch_size)
        fresh = (view.ring.written, length) != (self._seen, self._length)
        firsts = self._find(view, length) if fresh else self._firsts
        if self.drop_last and firsts.shape[0] < number:
            msg = (
                f"a batch of {number} slices needs as many episodes with drop_last=True, there are "
                f"{firsts.shape[0]} of {slicing.need(length)} rows or more: add some or lower batch_size"
            )
            raise OptionError(msg)
        if fresh:  # only now: a draw that raises leaves the pass as it was
            SamplerWithoutReplacement.restart(self)
            self._firsts, self._seen, self._length = firsts, view.ring.written, length
        # its rows are the episodes of the pass, numbered by age
        episodes = view._replace(rows=firsts.shape[0], capacity=firsts.shape[0], starts=None)
        picked = SamplerWithoutReplacement.draw(self, episodes, number, generator).slots
        first, lengths = slicing.place(firsts[picked], length, view, generator)
        return Draw(first, lengths=lengths)

    def _find(self, view: View, length: int) -> Tensor:
        """Return the first rows of the episodes that are long enough, int64 `[n]`.

        Raises:
            EmptyBufferError: if there is none.
        """
        table = episodes_of(view)
        spans = table.episodes()
        firsts = spans.first[spans.rows >= self._slicing.need(length)].to(view.device)
        self._slicing.require(firsts.shape[0], length, table)
        return firsts

    def state_dict(self) -> dict[str, Any]:
        """Return order and place in the pass."""
        return {
            **SliceSampler.state_dict(self),
            **SamplerWithoutReplacement.state_dict(self),
            "firsts": self._firsts,
            "seen": self._seen,
            "length": self._length,
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Raise if a state is damaged, or of other options.

        Raises:
            CheckpointError: naming what differs.
        """
        firsts = state["firsts"]
        sound = firsts.dtype is torch.int64 and firsts.ndim == 1 and int(state["rows"]) <= firsts.shape[0]
        if not sound or (firsts.numel() and int(firsts.min()) < 0):
            msg = "the sampler's state is damaged: it names more episodes than it holds"
            raise CheckpointError(msg)
        SliceSampler.check_state(self, state, rows)
        SamplerWithoutReplacement.check_state(self, state, rows)

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return a state for rows that have moved: the pass is one over episodes, known by their first rows."""
        return {**state, "firsts": (state["firsts"] - seam).remainder_(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `check_state`."""
        SamplerWithoutReplacement.load_state_dict(self, state)
        firsts = state["firsts"]
        self._firsts, self._seen, self._length = firsts.clone(), int(state["seen"]), int(state["length"])


@final
class PrioritizedSliceSampler(PrioritizedSampler):
    """Draws slices of episodes that begin at rows drawn in proportion to their priority.

    The distribution of a start is that of `PrioritizedSampler` over the rows that have room for a slice in their
    episode; others keep their priority, but are not drawn until they have. With `strict_length=False` the first row
    present of an episode can always be drawn, so that an episode shorter than a slice is drawn whole; a slice of a
    longer episode has full length. Weights are those of the first row, repeated for all rows of its slice; generations
    are those of each row, and `update_priority` with a sample gives priorities to all of its rows. An instance of
    `PrioritizedSampler`, as TorchRL's is.

    With `num_slices` the length of a slice follows from the batch size; a new one costs one pass over the rows.

    Args:
        max_capacity: see `PrioritizedSampler`, also for `alpha` to `reduction` and `max_priority_within_buffer`.
        num_slices: see `SliceSampler`, also for the arguments that follow.
        span: lets slices end early at the end of their episode, True by any number of rows, a number by at most so
            many; the left side has no effect, and warns.

    Raises:
        KindError: if not exactly one of `num_slices` and `slice_len` is given.
        OptionError: if options exclude each other.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer
        >>> sampler = PrioritizedSliceSampler(100, alpha=0.7, beta=0.5, slice_len=3, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
        >>> index = rb.extend({"episode": torch.arange(12) // 4})
        >>> batch, info = rb.sample(return_info=True)
        >>> info["priority_weight"].shape
        torch.Size([6])
    """

    slices = True

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        span: bool | int | tuple[bool | int, bool | int] = False,
        max_priority_within_buffer: bool = False,
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        check_ignored(compiled=compile, use_gpu=False)
        left, right = span if isinstance(span, tuple) else (span, span)
        if left:
            warnings.warn(
                "PrioritizedSliceSampler draws the first row of a slice: span has no effect on its left side",
                UserWarning,
                stacklevel=2,
            )
        options = SliceOptions(num_slices, slice_len, truncated_key, init_key, strict_length, False, (False, right))  # noqa: FBT003
        self._slicing = Slicing(options)
        self.episodes = slice_episodes(end_key, end_keys, traj_key, ends, trajectories, cache_values=cache_values)
        self._length = slice_len
        self.span = 1 if slice_len is None or not strict_length else slice_len

    def __repr__(self) -> str:
        """Options and rows."""
        options = self._slicing.options
        return (
            f"PrioritizedSliceSampler(num_slices={options.num_slices}, slice_len={options.slice_len}, "
            f"{self.episodes!r}, "
            f"{PrioritizedSampler.__repr__(self).partition('(')[2]}"
        )

    def _starts(self, view: View) -> Starts | None:
        if view.rows == 0:
            return None  # an empty buffer keeps no account of episodes yet
        return self._starts_of(self._length, view)

    def _starts_of(self, length: int | None, view: View) -> Starts | None:
        """Return the rows at which a slice of this length may begin; None stands for all of them."""
        table = episodes_of(view)
        need = 1 if length is None else self._slicing.least(length)
        return None if need == 1 and not table.masked else table.starts(need)

    def _reached(self, slots: Tensor, starts: Starts, episodes: EpisodeTable) -> Tensor:
        older = super()._reached(slots, starts, episodes)
        if self._slicing.options.strict_length:
            return older
        episodes.track_firsts()
        return torch.cat((older, episodes.moved_firsts(slots.device)))

    def _allowed(self, slots: Tensor, view: View) -> Tensor | None:
        """Return which rows have room for a slice; without `strict_length` also the first row of each episode."""
        allowed = super()._allowed(slots, view)
        if allowed is None or self._slicing.options.strict_length:
            return allowed
        return allowed | (episodes_of(view).behind(slots) == 0)

    def begin(self, view: View) -> None:
        """Give the rows present the default priority, but those that a state brought priorities for."""
        if view.rows and not self._slicing.options.strict_length:
            episodes_of(view).track_firsts()
        super().begin(view)

    def mass(self, view: View) -> None:  # noqa: ARG002
        """Return None: it draws slices, not single rows."""
        return

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
            PriorityError: if no row that a slice may begin with has a priority above 0.
        """
        if self._check_slices(view, batch_size) == self._length:
            super().check_draw(view, batch_size)

    def _check_slices(self, view: View, batch_size: int) -> int:
        """Return the length of slices in a batch, if there is one to draw."""
        length = self._slicing.split(batch_size)[1]
        table, starts = episodes_of(view), self._starts_of(length, view)
        if starts is not None:
            rows = starts.rows if self._slicing.options.strict_length else table.rows
            self._slicing.require(rows, starts.need, table)
        return length

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slices: their first rows with weights and stamps, and their lengths.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
        """
        self._check_slices(view, batch_size)
        number, length = self._slicing.split(batch_size)
        table = episodes_of(view)
        if length != self._length:  # only now: a draw that raises leaves the sampler as it was
            self._length = length
            self.begin(view)
        drawn = super().draw(view, number, generator)
        if self._slicing.plain:
            return drawn._replace(length=length)
        return drawn._replace(lengths=(table.ahead(drawn.slots) + 1).clamp_(max=length))

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:
        """Return the flags of the slices; see `SliceSampler`."""
        return self._slicing.marks(plan, data)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of priorities, and the length that rows were last drawn for."""
        return {**super().state_dict(), "length": self._length, "slices": self._slicing.form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Raise if a state is damaged, or of other options; see `PrioritizedSampler`."""
        self._slicing.check_form(state)
        length = state["length"]
        if length is not None and (type(length) is not int or length < 1):
            msg = f"the sampler's state is damaged: it was drawn for slices of {length!r} rows"
            raise CheckpointError(msg)
        super().check_state(state, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `PrioritizedSampler`."""
        super().load_state_dict(state)
        self._length = state["length"]
