"""Slice samplers: they draw episodes, or rows by priority, and slices of episodes that begin there."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, final

import torch

from ostinato.core import kinds
from ostinato.core.episodes.keys import Episodes, as_path
from ostinato.core.options import check_integer
from ostinato.core.records import Draw
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, TooFewRowsError, UsageError
from ostinato.samplers.base import Sampler, check_replacement
from ostinato.samplers.prioritized import PrioritizedSampler
from ostinato.samplers.state import new_slots, require
from ostinato.samplers.uniform import SamplerWithoutReplacement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.eligible import EligibleRows
    from ostinato.core.episodes.keys import Key
    from ostinato.core.episodes.table import EpisodeTable, Starts
    from ostinato.core.records import Plan, View
    from ostinato.core.rows import Path
    from ostinato.samplers.standalone import BareStorage

    Side: TypeAlias = bool | int
    Span: TypeAlias = Side | tuple[Side, Side] | list[Side]

_SIDES = 2
_TOP = 2**63 - 1  # random numbers are uniform in [0, _TOP)
_TRAJ_KEYS = (("collector", "traj_ids"), ("episode",))


class _Keys(NamedTuple):
    """The arguments that give the episodes, with TorchRL's names."""

    end_key: Key | None
    end_keys: Sequence[Key] | None
    traj_key: Key | None
    ends: Tensor | None
    trajectories: Tensor | None
    cache_values: bool
    step_key: Key | None = "step_count"
    fragmented: bool = False


class _Options(NamedTuple):
    """The options of slices, with TorchRL's names."""

    num_slices: int | None
    slice_len: int | None
    truncated_key: Key | None
    init_key: Key | None
    strict_length: bool
    pad_output: bool = False
    span: Span = False


class _Slicer:
    """The part that all slice samplers share: number and length of slices, and the flags that they add to a batch."""

    slices = True
    episodes: Episodes | None

    def __init__(self, options: _Options, keys: _Keys) -> None:
        if (options.num_slices is None) == (options.slice_len is None):
            msg = (
                "Either num_slices or slice_len must be not None, and not both, got "
                f"num_slices={options.num_slices} and slice_len={options.slice_len}"
            )
            raise KindError(msg)
        sizes: dict[str, Any] = {
            name: check_integer(name, getattr(options, name), 1, OptionError)
            for name in ("num_slices", "slice_len")
            if getattr(options, name) is not None
        }
        options = options._replace(**sizes)
        if options.pad_output and options.strict_length:
            msg = (
                "pad_output=True is incompatible with strict_length=True, where no slice is shorter than the others: "
                "set strict_length=False"
            )
            raise OptionError(msg)
        self._options = options
        self._keys = keys
        self.episodes = _choose_episodes(keys)
        self.cache_values = bool(keys.cache_values)
        self.slice_steps = options.slice_len if options.slice_len is not None and options.strict_length else 1
        self._left, self._right = _checked_span(options.span, options.slice_len)
        self._full = options.strict_length and not self._left and not self._right  # every slice has full length
        self._truncated = None if options.truncated_key is None else as_path(options.truncated_key)
        self._init = None if options.init_key is None else as_path(options.init_key)
        none = torch.empty(0, dtype=torch.bool, device="cpu")
        self._last: tuple[Any, Tensor, Tensor] = (None, none, none)  # flags and zeros `[R, 1]` of the last batch
        self._divided: tuple[int, tuple[int, int]] = (0, (0, 0))  # the last batch size, and the slices in it
        self._found: Episodes | None = None  # the fields that the episodes of the last draw were read from

    @property
    def num_slices(self) -> int | None:
        """Number of slices in a batch; None if it depends on the batch size."""
        return self._options.num_slices

    @property
    def slice_len(self) -> int | None:
        """Rows of a slice; None if they depend on the batch size."""
        return self._options.slice_len

    @property
    def span(self) -> tuple[bool | int, bool | int]:
        """How far slices reach out of their episode on the left and the right."""
        return self._left, self._right

    @property
    def strict_length(self) -> bool:
        """Whether all slices have full length."""
        return self._options.strict_length

    @property
    def pad_output(self) -> bool:
        """Whether shorter slices are padded."""
        return self._options.pad_output

    @property
    def truncated_key(self) -> Key | None:
        """Where the last rows of slices are marked."""
        return self._options.truncated_key

    @property
    def init_key(self) -> Key | None:
        """Where the first rows of slices are marked."""
        return self._options.init_key

    @property
    def traj_key(self) -> Key | None:
        """The trajectory key; if none was given, the one that the last draw has found in the rows."""
        if self._keys.traj_key is not None or self._found is None or self._found.traj_path is None:
            return self._keys.traj_key
        path = tuple(map(str, self._found.traj_path))
        return path if len(path) > 1 else path[0]

    @property
    def end_key(self) -> Key | None:
        """The end key; without keys or tensors `("next", "done")`, which stands for the usual flags."""
        keys = self._keys
        given = (keys.end_key, keys.end_keys, keys.ends, keys.trajectories)
        return ("next", "done") if all(value is None for value in given) else keys.end_key

    @property
    def end_keys(self) -> tuple[Key, ...] | None:
        """The end keys, if several were given."""
        return None if self._keys.end_keys is None else tuple(self._keys.end_keys)

    @property
    def step_key(self) -> Key | None:
        """The key of step numbers."""
        return self._keys.step_key

    @property
    def fragmented(self) -> bool:
        """Whether the rows of an episode are ordered by their step numbers."""
        return self._keys.fragmented

    @property
    def full(self) -> bool:
        """Whether every slice has full length, and lies in its episode."""
        return self._full

    def _table_of(self, view: View) -> EpisodeTable:
        table = view.require_episodes()
        self._found = table.read_from
        return table

    def _split(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices in a batch, and their length.

        Raises:
            UsageError: if the batch size is not a multiple of the option.
        """
        known, divided = self._divided
        if known != batch_size:
            divided = self._divide(batch_size)
            self._divided = (batch_size, divided)
        return divided

    def _divide(self, batch_size: int) -> tuple[int, int]:
        number, length = self._options.num_slices, self._options.slice_len
        part = length if number is None else number
        if part is None or batch_size % part:
            what = "slice length, slice_len" if number is None else "number of slices, num_slices"
            msg = f"The batch-size must be divisible by the {what}={part}, got batch_size={batch_size}"
            raise UsageError(msg)
        if number is None:
            return batch_size // part, part
        _checked_span(self._options.span, batch_size // part)
        return part, batch_size // part

    def _too_short(self, length: int, table: EpisodeTable) -> EmptyBufferError:
        longest = int(table.episodes().rows.max()) if table.count else 0
        return EmptyBufferError(
            f"Did not find a single trajectory with sufficient length: of {table.rows} rows in {table.count} episodes "
            f"none has the {length} rows of a slice (the longest has {longest}): add "
            "longer episodes, shorten the slices, or allow shorter ones with strict_length=False"
        )

    def _pads(self, view: View, length: int) -> bool:
        """Return whether some slices of this length may be shorter, and are to be padded."""
        if not self._options.pad_output:
            return False
        table = view.require_episodes()
        return bool(self._left or self._right) or table.starts(length).episodes < table.count

    def _place(self, rows: Tensor, length: int, view: View, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Place one slice in the episode of each row: its first slot, and its length, int64 `[n]` each.

        The start is uniform over `[0, n - length]` in an episode of `n` rows; without `strict_length`, an episode of
        `n < length` rows is one slice. `span` allows starts further left or right: the slice then reaches out of its
        episode on this side, and is shorter.
        """
        table = view.require_episodes()
        behind = table.behind(rows)
        have = table.ahead(rows) + behind + 1
        full = have.clamp(max=length)
        left, right = (
            (full - 1).clamp(max=length - 1 if side is True else int(side)) for side in (self._left, self._right)
        )
        counts = have - full + right + left + 1
        randoms = torch.randint(0, _TOP, rows.shape, generator=generator, device=view.device)
        drawn = ((randoms >> 10).to(torch.float64) * 2.0**-53 * counts).to(torch.int64).clamp_(max=counts - 1)
        start = drawn - left
        first = start.clamp(min=0)
        return table.shift(rows, first - behind), torch.minimum(start + full, have) - first

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:
        """Return the flags of the slices by path, `[R, 1]` or in the shape of the stored ones; see `SliceSampler`."""
        out: dict[Path, Tensor] = {}
        path = self._truncated
        if path is not None:
            last, zeros = self._last_of_each(plan)
            level, stored, held = kinds.find_field(data, path[:-1]), None, None
            if level is not None:
                stored, held = kinds.find_field(level, ("done",)), kinds.find_field(level, ("terminated",))
            out[path] = last.clone() if stored is None else _spread(last, stored).expand_as(stored).clone()
            out[*path[:-1], "done"] = last.clone() if stored is None else _set_where(last, stored)
            out[*path[:-1], "terminated"] = zeros.clone() if held is None else held.clone()
        initial = None if self._init is None else kinds.find_field(data, self._init)
        if initial is not None and self._init is not None:
            out[self._init] = _set_where(plan.first_of_each(), initial)
        return out

    def _last_of_each(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Return which rows end their slice, and False for each, bool `[R, 1]`; shared by batches: do not write."""
        if plan.last is not None or plan.owner is not None:
            last = plan.last_of_each()[:, None]
            return last, torch.zeros_like(last)
        key = (plan.records.shape, plan.repeat, plan.records.device)
        known, last, zeros = self._last  # read once: batches may be made in several threads
        if known != key:
            last = plan.last_of_each()[:, None]
            zeros = torch.zeros_like(last)
            self._last = (key, last, zeros)
        return last, zeros

    @property
    def _form(self) -> str:
        """The options that a state must agree with, as text."""
        options = self._options
        names = ("num_slices", "slice_len", "strict_length", "pad_output")
        values = [f"{name}={getattr(options, name)}" for name in names]
        return ", ".join([*values, f"span={(self._left, self._right)}"])

    def _check_form(self, state: dict[str, Any]) -> None:
        if state["slices"] != self._form:
            msg = f"the state is that of slices with {state['slices']}, these have {self._form}: use the same options"
            raise CheckpointError(msg)


def _checked_span(span: Any, length: int | None) -> tuple[Side, Side]:
    """Return the left and the right side of a span.

    Raises:
        OptionError: if it is not True, False or a number below the slice length, per side.
    """
    both = tuple(span) if isinstance(span, (tuple, list)) else (span, span)
    valid = [isinstance(side, bool) or (isinstance(side, int) and side >= 0) for side in both]
    if len(both) != _SIDES or not all(valid):
        msg = f"span is True, False or a number of rows, or a pair of these for the left and the right, got {span!r}"
        raise OptionError(msg)
    if length is not None and any(not isinstance(side, bool) and side >= length for side in both):
        msg = (
            f"The right and left span must be strictly lower than the sequence length {length}, got {span!r}: True "
            "allows any number of rows"
        )
        raise OptionError(msg)
    return both


def _spread(flags: Tensor, stored: Tensor) -> Tensor:
    """Return flags `[R]` or `[R, 1]` with as many dimensions as the stored ones. A *view*."""
    return flags if flags.ndim == stored.ndim else flags.view(-1, *[1] * (stored.ndim - 1))


def _set_where(flags: Tensor, stored: Tensor) -> Tensor:
    """Return the stored flags, of any dtype, with ones where `flags` is True."""
    return torch.where(_spread(flags, stored), torch.ones_like(stored), stored)


def _choose_episodes(keys: _Keys) -> Episodes:
    """Return where episodes end, from the arguments of a slice sampler.

    Raises:
        UsageError: if they are mutually exclusive.
    """
    if keys.end_key is not None and keys.end_keys is not None:
        msg = "`end_key` and `end_keys` are exclusive arguments: give one of them"
        raise UsageError(msg)
    if keys.fragmented:
        _check_fragmented(keys)
    if keys.ends is not None or keys.trajectories is not None:
        return _fixed_episodes(keys)
    if keys.fragmented:
        return Episodes(None, keys.traj_key or list(_TRAJ_KEYS), optional=keys.traj_key is None, step_key=keys.step_key)
    if keys.end_keys is not None:
        return Episodes(list(keys.end_keys), keys.traj_key, optional=True)
    if keys.end_key is None and keys.traj_key is None:
        return Episodes(None, list(_TRAJ_KEYS), optional=True)
    return Episodes(keys.end_key, keys.traj_key, optional=keys.end_key is not None and keys.traj_key is not None)


def _check_fragmented(keys: _Keys) -> None:
    """Check that there are step numbers to read.

    Raises:
        OptionError: if there are none.
    """
    if keys.step_key is None:
        msg = "step_key must be provided when fragmented=True, got None: name the field of the step numbers"
        raise OptionError(msg)
    for name, problem in (
        ("ends", "fragmented=True requires trajectory and step identifiers, got ends: "),
        ("trajectories", "The static trajectories argument is not supported with fragmented=True: "),
    ):
        if getattr(keys, name) is not None:
            msg = f"{problem}give traj_key and step_key"
            raise OptionError(msg)


def _fixed_episodes(keys: _Keys) -> Episodes:
    """Return the episodes that a tensor gives.

    Raises:
        UsageError: if there are keys too, or without `cache_values`.
    """
    names = ("ends", "trajectories", "end_key", "end_keys", "traj_key")
    given = [name for name in names if getattr(keys, name) is not None]
    if len(given) > 1:
        msg = f"{' and '.join(given)} are exclusive arguments: give one tensor, or keys"
        raise UsageError(msg)
    if not keys.cache_values:
        msg = (
            f"To be used, {given[0]} requires `cache_values` to be set to `True`: it gives the episodes of fixed rows, "
            "got cache_values=False"
        )
        raise UsageError(msg)
    return Episodes(ends=keys.ends, trajectories=keys.trajectories)


class SliceSampler(_Slicer, Sampler):
    """Draws slices of episodes: an episode with equal probability among those that are long enough, then a start in it.

    A batch of `num_slices` slices of `slice_len` rows each is flat, `[num_slices * slice_len, *shape]`. No slice
    contains rows of two episodes, or continues past the newest row. Every start that leaves room for a slice has the
    same probability within its episode. If rows of several episodes are interleaved (`traj_key`), a slice has rows of
    one episode.

    Slices add flags to the batch. The last row of each slice is True under `truncated_key` and under `done` beside it;
    other `done` flags and all `terminated` flags are the stored ones. If rows have `init_key`, it is True on the first
    row of each slice. The flags are in the info of a sample and in TensorDict samples.

    Cost: O(slices), whatever the size of the buffer.

    Args:
        num_slices: slices in a batch; their length is `batch_size // num_slices`. Exclusive with `slice_len`.
        slice_len: rows of a slice; a batch has `batch_size // slice_len` of them.
        end_key: field that ends episodes. Without it and `traj_key`, the trajectory key is
            `("collector", "traj_ids")` or `episode` if rows have it, and the usual flags end episodes (see `Episodes`).
        end_keys: several such fields: any of them ends an episode; fields that rows lack are ignored.
        traj_key: field with the id of a row's episode.
        step_key: field with the step number of a row in its trajectory, read with `fragmented`. Otherwise the order of
            writing is the order of steps.
        fragmented: divide a trajectory where a step is missing: a row whose step is not one more than that of the row
            of its id written before begins a new episode. Flags do not end episodes then. Rows of one id are written
            in the order of their steps; interleaved ids need no `fragmented`.
        ends: bool `[rows]` for fixed rows; needs `cache_values=True`.
        trajectories: ids `[rows]` for fixed rows; needs `cache_values=True`.
        cache_values: needed for `ends` and `trajectories`; lets `sample` keep the episodes of a bare storage. No effect
            in a buffer, which records episodes as rows are written.
        truncated_key: see above; None adds no flags.
        init_key: see above; None keeps the stored flags.
        strict_length: False draws episodes shorter than a slice too, each as one slice.
        pad_output: repeat the last row of shorter slices; the mask `("collector", "mask")` is False there. There is no
            mask if all episodes are long enough.
        span: let slices reach out of their episode on the left and the right, which makes them shorter: True down to
            one row, a number by at most so many rows; a pair for each side.
        compile: no effect: there is no search for episodes to compile, since a draw costs O(slices).
        use_gpu: no effect, for the same reason.
        replacement: False makes a `SliceSamplerWithoutReplacement` instead.

    Raises:
        KindError: if not exactly one of `num_slices` and `slice_len` is given.
        UsageError: if arguments that give the episodes are mutually exclusive.
        OptionError: for other options that are mutually exclusive, or out of range.

    Examples:
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

    row_values: tuple[str, ...] | None = ()

    def __new__(cls, *args: Any, replacement: bool = True, **kwargs: Any) -> Self:  # noqa: ARG004
        """Make the sampler that `replacement` selects; subclasses have no other variant."""
        if cls is not SliceSampler and not issubclass(cls, SliceSamplerWithoutReplacement):
            check_replacement(cls, replacement=replacement)
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
        step_key: Key | None = "step_count",
        fragmented: bool = False,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        span: Span = False,
        use_gpu: bool | torch.device = False,
        replacement: bool = True,
    ) -> None:
        del replacement  # read by __new__
        keys = _Keys(end_key, end_keys, traj_key, ends, trajectories, cache_values, step_key, fragmented)
        _Slicer.__init__(
            self, _Options(num_slices, slice_len, truncated_key, init_key, strict_length, pad_output, span), keys
        )
        self.compile = bool(compile)
        self.use_gpu = bool(use_gpu)

    def __repr__(self) -> str:
        """Options."""
        options = self._options
        return (
            f"{type(self).__name__}(num_slices={options.num_slices}, slice_len={options.slice_len}, {self.episodes!r}, "
            f"strict_length={options.strict_length})"
        )

    def _starts(self, view: View, length: int) -> Starts:
        """Return the rows of the episodes that are long enough.

        Raises:
            EmptyBufferError: if there is none.
        """
        table = self._table_of(view)
        starts = table.starts(length if self._options.strict_length else 1)
        if not starts.rows:
            raise self._too_short(length, table)
        return starts

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is not a multiple of the option.
        """
        self._starts(view, self._split(batch_size)[1])

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slices: their first rows and their lengths.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is not a multiple of the option.
        """
        number, length = self._split(batch_size)
        starts = self._starts(view, length)
        rows = starts.draw_episodes(torch.randint(0, _TOP, (2 * number,), generator=generator, device=view.device))
        if self._full:
            return Draw(rows, length=length)
        first, lengths = self._place(rows, length, view, generator)
        return Draw(first, lengths=lengths, pad=length if self._pads(view, length) else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the options that a state must agree with."""
        return {"slices": self._form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: ARG002
        """Compare the options with those of a state.

        Raises:
            CheckpointError: if they differ.
        """
        self._check_form(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the options with those of a state; see `check_state`."""
        self._check_form(state)


@final
class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices in passes: in each pass, every episode that is long enough is drawn exactly once.

    The start within the episode is uniform. Writing to the buffer begins a new pass, and so does a batch with slices of
    another length (`num_slices`). The last batch of a pass has the slices that are left, unless `drop_last`. An
    instance of both base classes, as in TorchRL.

    Args:
        num_slices: see `SliceSampler`, also for the arguments not listed here. `span` and `pad_output` do not exist.
        drop_last: leave out the last batch of a pass if it has fewer slices.
        shuffle: False draws the episodes in the order of their age.

    Examples:
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
        """Options, and episodes drawn in this pass."""
        return f"{SliceSampler.__repr__(self)[:-1]}, drawn={self._at} of {self._firsts.shape[0]} episodes)"

    def _least(self, length: int) -> int:
        """Return the number of rows that an episode must have to be drawn."""
        return length if self._options.strict_length else 1

    def restart(self) -> None:
        """Begin a new pass with the next draw."""
        SamplerWithoutReplacement.restart(self)
        self._seen = -1

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw the next slices of the pass.

        Raises:
            EmptyBufferError: if no episode is long enough.
        """
        number, length = self._split(batch_size)
        fresh = (view.ring.written, length) != (self._seen, self._length)
        firsts = self._find(view, length) if fresh else self._firsts
        self._check_drop_last(firsts, number, length)
        if fresh:  # only now: a draw that raises leaves the pass as it was
            SamplerWithoutReplacement.restart(self)
            self._firsts, self._seen, self._length = firsts, view.ring.written, length
        # the rows of this view are the episodes of the pass, numbered by age
        episodes = view._replace(rows=firsts.shape[0], capacity=firsts.shape[0], starts=None)
        picked = SamplerWithoutReplacement.draw(self, episodes, number, generator).slots
        first, lengths = self._place(firsts[picked], length, view, generator)
        return Draw(first, lengths=lengths)

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            TooFewRowsError: with `drop_last`, if there are fewer episodes than slices in a batch.
            UsageError: if the batch size is not a multiple of the option.
        """
        number, length = self._split(batch_size)
        self._check_drop_last(self._find(view, length), number, length)

    def _check_drop_last(self, firsts: Tensor, number: int, length: int) -> None:
        if self.drop_last and firsts.shape[0] < number:
            msg = (
                f"The batch size ({number} slices) is greater than the storage capacity with drop_last=True: there are "
                f"{firsts.shape[0]} episodes of {self._least(length)} rows or more: add some or lower batch_size"
            )
            raise TooFewRowsError(msg)

    def _find(self, view: View, length: int) -> Tensor:
        """Return the first rows of the episodes that are long enough, int64 `[n]`.

        Raises:
            EmptyBufferError: if there is none.
        """
        table = self._table_of(view)
        spans = table.episodes()
        firsts = spans.first[spans.rows >= self._least(length)].to(view.device)
        if not firsts.shape[0]:
            raise self._too_short(length, table)
        return firsts

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the pass, and how much of it was drawn."""
        return {
            **SliceSampler.state_dict(self),
            **SamplerWithoutReplacement.state_dict(self),
            "firsts": self._firsts,
            "seen": self._seen,
            "length": self._length,
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check a state before it is loaded.

        Raises:
            CheckpointError: if it is damaged, or its options differ.
        """
        firsts = state["firsts"]
        sound = firsts.dtype is torch.int64 and firsts.ndim == 1 and int(state["rows"]) <= firsts.shape[0]
        sound = sound and not (firsts.numel() and int(firsts.min()) < 0)
        require(sound, "it names more episodes than it holds")
        SliceSampler.check_state(self, state, rows)
        SamplerWithoutReplacement.check_state(self, state, rows)

    def move_state(self, state: dict[str, Any], order: Tensor) -> dict[str, Any] | None:
        """Return the state after rows were moved: the first slots identify the episodes of a pass.

        A pass with episodes whose first rows have left begins anew.
        """
        firsts = new_slots(order, state["firsts"])
        return None if bool((firsts < 0).any()) else {**state, "firsts": firsts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `check_state`."""
        SamplerWithoutReplacement.load_state_dict(self, state)
        firsts = state["firsts"]
        self._firsts, self._seen, self._length = firsts.clone(), int(state["seen"]), int(state["length"])


@final
class PrioritizedSliceSampler(_Slicer, PrioritizedSampler):
    """Draws slices of episodes that begin at rows drawn in proportion to their priority.

    The distribution of a start is that of `PrioritizedSampler` over the rows that have room for a slice in their
    episode. Other rows keep their priority, but are not drawn until there is room. With `strict_length=False` the first
    row present of an episode can always be drawn, so an episode shorter than a slice is one slice; slices of longer
    episodes have full length. The weight of a row is that of the first row of its slice; generations are those of each
    row, and `update_priority` with a sample sets the priorities of all of its rows, without the repeated ones of
    `pad_output`. An instance of `PrioritizedSampler`, as in TorchRL.

    With `num_slices` the length of a slice depends on the batch size; a new length costs one pass over the rows.

    Args:
        max_capacity: see `PrioritizedSampler`, also for `alpha` to `reduction` and `max_priority_within_buffer`.
        num_slices: see `SliceSampler`, also for the arguments that follow.
        span: let slices end early at the end of their episode: True by any number of rows, a number by at most so
            many. The left side has no effect, and warns.

    Raises:
        KindError: if not exactly one of `num_slices` and `slice_len` is given.
        OptionError: if options are mutually exclusive.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer
        >>> sampler = PrioritizedSliceSampler(100, alpha=0.7, beta=0.5, slice_len=3, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
        >>> index = rb.extend({"episode": torch.arange(12) // 4})
        >>> batch, info = rb.sample(return_info=True)
        >>> info["priority_weight"].shape
        torch.Size([6])
    """

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
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        span: Span = False,
        max_priority_within_buffer: bool = False,
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        PrioritizedSampler.__init__(self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        left, right = _checked_span(span, slice_len)
        if left:
            warnings.warn(
                "Left spanning is disabled for PrioritizedSliceSampler, which draws the first row of a slice: the left "
                "side of span has no effect",
                UserWarning,
                stacklevel=2,
            )
        keys = _Keys(end_key, end_keys, traj_key, ends, trajectories, cache_values)
        span = (False, right)
        options = _Options(num_slices, slice_len, truncated_key, init_key, strict_length, pad_output, span)
        _Slicer.__init__(self, options, keys)
        self.compile = bool(compile)
        self._length = self.slice_len

    def __repr__(self) -> str:
        """Options and rows."""
        options = self._options
        return (
            f"PrioritizedSliceSampler(num_slices={options.num_slices}, slice_len={options.slice_len}, "
            f"{self.episodes!r}, "
            f"{PrioritizedSampler.__repr__(self).partition('(')[2]}"
        )

    def _starts(self, view: View) -> Starts | None:
        if view.rows == 0:
            return None  # an empty buffer has no episode table yet
        return self._starts_of(self._length, view)

    def _starts_of(self, length: int | None, view: View) -> Starts | None:
        """Return the rows at which a slice of this length may begin; None stands for all of them."""
        table = view.require_episodes()
        need = 1 if length is None or self._right is True else max(1, length - int(self._right))  # rows of a slice
        return None if need == 1 and not table.masked else table.starts(need)

    def _completed(self, slots: Tensor, starts: EligibleRows, episodes: EpisodeTable) -> Tensor:
        older = super()._completed(slots, starts, episodes)
        if self._options.strict_length:
            return older
        episodes.track_firsts()
        return torch.cat((older, episodes.moved_firsts(slots.device)))

    def _allowed(self, slots: Tensor, view: View) -> Tensor | None:
        """Return which rows have room for a slice; without `strict_length` also the first row of each episode."""
        allowed = super()._allowed(slots, view)
        if allowed is None or self._options.strict_length:
            return allowed
        return allowed | (view.require_episodes().behind(slots) == 0)

    def begin(self, view: View) -> None:
        """Give the rows present the default priority, except those with a priority from a state."""
        if view.rows and not self._options.strict_length:
            view.require_episodes().track_firsts()
        super().begin(view)

    def begin_standalone(self, view: View, storage: BareStorage) -> View:
        """Prepare the priorities of a bare storage, and hide the rows that no slice may begin with."""
        super().begin_standalone(view, storage)
        self.begin(view)
        return view

    def mass(self, view: View) -> None:  # noqa: ARG002
        """Return None: it draws slices, not single rows."""
        return

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is not a multiple of the option.
            PriorityError: if no row that a slice may begin with has a priority above 0.
        """
        if self._check_slices(view, batch_size) == self._length:
            super().check_draw(view, batch_size)

    def _check_slices(self, view: View, batch_size: int) -> int:
        """Return the length of the slices in a batch.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is not a multiple of the option.
        """
        length = self._split(batch_size)[1]
        table, starts = self._table_of(view), self._starts_of(length, view)
        if starts is not None:
            rows = starts.rows if self._options.strict_length else table.rows
            if not rows:
                raise self._too_short(starts.need, table)
        return length

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slices: their first rows with weights and generations, and their lengths.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is not a multiple of the option.
        """
        length = self._check_slices(view, batch_size)
        table = view.require_episodes()
        if length != self._length:  # only now: a draw that raises leaves the sampler as it was
            self._length = length
            self.begin(view)
        drawn = super().draw(view, batch_size // length, generator)
        if self._full:
            return drawn._replace(length=length)
        lengths = (table.ahead(drawn.slots) + 1).clamp_(max=length)
        return drawn._replace(lengths=lengths, pad=length if self._pads(view, length) else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the priorities, and the length of the last slices."""
        return {**super().state_dict(), "length": self._length, "slices": self._form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check a state before it is loaded; see `PrioritizedSampler`."""
        self._check_form(state)
        length = state["length"]
        require(length is None or (type(length) is int and length >= 1), f"its slices have {length!r} rows")
        super().check_state(state, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `PrioritizedSampler`."""
        super().load_state_dict(state)
        self._length = state["length"]
