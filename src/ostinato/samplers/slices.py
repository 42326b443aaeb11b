"""Slice samplers: they draw episodes, or rows by priority, and slices of episodes that begin there."""

from __future__ import annotations

import warnings
from collections import deque
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, final

import numpy as np
import torch

from ostinato.core import kinds
from ostinato.core.eligible import grown
from ostinato.core.episodes.tracker import Episodes, as_path
from ostinato.core.options import check_integer
from ostinato.core.records import Draw, Run
from ostinato.errors import EmptyBufferError, KindError, OptionError, TooFewRowsError, UsageError
from ostinato.samplers.base import Sampler, check_replacement, new_slots, require, require_options
from ostinato.samplers.prioritized import PrioritizedSampler
from ostinato.samplers.uniform import SamplerWithoutReplacement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.eligible import EligibleRows
    from ostinato.core.episodes.table import EpisodeTable, Starts
    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import Placement, Plan, View
    from ostinato.core.rows import Path
    from ostinato.samplers.base import StorageShape, WriterOrder

Side: TypeAlias = bool | int
_SIDES = 2
_TOP = 2**63 - 1  # random numbers are uniform in [0, _TOP)
_TRAJ_KEYS = (("collector", "traj_ids"), ("episode",))


class SliceOptions(TypedDict, total=False):
    """Options that all slice samplers have; see `SliceSampler`."""

    end_key: Key | None
    end_keys: Sequence[Key] | None
    traj_key: Key | None
    step_key: Key | None
    fragmented: bool
    ends: Tensor | None
    trajectories: Tensor | None
    cache_values: bool
    truncated_key: Key | None
    init_key: Key | None
    strict_length: bool
    pad_output: bool
    compile: bool | dict[str, Any]
    span: Side | tuple[Side, Side] | list[Side]
    use_gpu: bool | torch.device
    replacement: bool


class SliceSampler(Sampler):
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

    slices = True
    episodes: Episodes
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
        span: Side | tuple[Side, Side] | list[Side] = False,
        use_gpu: bool | torch.device = False,
        replacement: bool = True,
    ) -> None:
        del replacement  # read by __new__
        if (num_slices is None) == (slice_len is None):
            msg = (
                f"Either num_slices or slice_len must be not None, and not both, got num_slices={num_slices} and "
                f"slice_len={slice_len}"
            )
            raise KindError(msg)
        if pad_output and strict_length:
            msg = (
                "pad_output=True is incompatible with strict_length=True, where no slice is shorter than the others: "
                "set strict_length=False"
            )
            raise OptionError(msg)
        self._num_slices = None if num_slices is None else check_integer("num_slices", num_slices, 1, OptionError)
        self._slice_len = None if slice_len is None else check_integer("slice_len", slice_len, 1, OptionError)
        self._span = _checked_span(span, slice_len)
        self._strict_length, self._pad_output = bool(strict_length), bool(pad_output)
        self._full = self._strict_length and not any(self._span)
        self._truncated_key, self._init_key = truncated_key, init_key
        self._truncated, self._init = (None if key is None else as_path(key) for key in (truncated_key, init_key))
        self.cache_values = bool(cache_values)
        self._end_keys = None if end_keys is None else tuple(end_keys)
        self._traj_key, self._step_key, self._fragmented = traj_key, step_key, bool(fragmented)
        named = {"end_key": end_key, "end_keys": end_keys, "traj_key": traj_key}
        self.episodes = self._choose_episodes(named, {"ends": ends, "trajectories": trajectories})
        usual = all(given is None for given in (end_key, end_keys, ends, trajectories))
        self._end_key = ("next", "done") if usual else end_key
        self.slice_steps = self._slice_len if self._slice_len is not None and strict_length else 1
        self.compile, self.use_gpu = bool(compile), bool(use_gpu)
        self._found: Episodes | None = None  # the fields that the episodes of the last draw were read from

    def __repr__(self) -> str:
        """Options."""
        return (
            f"{type(self).__name__}(num_slices={self._num_slices}, slice_len={self._slice_len}, {self.episodes!r}, "
            f"strict_length={self._strict_length})"
        )

    num_slices = property(attrgetter("_num_slices"), doc="Number of slices in a batch; None if it depends on its size.")
    slice_len = property(attrgetter("_slice_len"), doc="Rows of a slice; None if they depend on the batch size.")
    span = property(attrgetter("_span"), doc="How far slices reach out of their episode on the left and the right.")
    strict_length = property(attrgetter("_strict_length"), doc="Whether all slices have full length.")
    pad_output = property(attrgetter("_pad_output"), doc="Whether shorter slices are padded.")
    truncated_key = property(attrgetter("_truncated_key"), doc="Where the last rows of slices are marked.")
    init_key = property(attrgetter("_init_key"), doc="Where the first rows of slices are marked.")
    end_key = property(attrgetter("_end_key"), doc='The end key; `("next", "done")` stands for the usual flags.')
    end_keys = property(attrgetter("_end_keys"), doc="The end keys, if several were given.")
    step_key = property(attrgetter("_step_key"), doc="The key of step numbers.")
    fragmented = property(
        attrgetter("_fragmented"), doc="Whether rows of an episode are ordered by their step numbers."
    )
    full = property(attrgetter("_full"), doc="Whether every slice has full length, and lies in its episode.")

    @property
    def traj_key(self) -> Key | None:
        """The trajectory key; if none was given, the one that the last draw has found in the rows."""
        if self._traj_key is not None or self._found is None or self._found.traj_path is None:
            return self._traj_key
        path = tuple(map(str, self._found.traj_path))
        return path if len(path) > 1 else path[0]

    def _choose_episodes(self, keys: dict[str, Any], tensors: dict[str, Any]) -> Episodes:
        """Return where episodes end.

        Raises:
            OptionError: with `fragmented`, for tensors or without step numbers.
            UsageError: if arguments are mutually exclusive, or for tensors without `cache_values`.
        """
        fixed = [name for name, value in tensors.items() if value is not None]
        given = [*fixed, *(name for name, value in keys.items() if value is not None)]
        if (fixed and len(given) > 1) or {"end_key", "end_keys"} <= set(given):
            msg = f"{' and '.join(f'`{name}`' for name in given)} are exclusive arguments: give one of them"
            raise UsageError(msg)
        if self._fragmented and (fixed or self._step_key is None):
            msg = (
                "step_key must be provided when fragmented=True, and fixed ends and trajectories are not supported "
                "with it: name the fields of trajectory and step numbers"
            )
            raise OptionError(msg)
        if fixed and not self.cache_values:
            msg = (
                f"To be used, {fixed[0]} requires `cache_values` to be set to `True`: it gives the episodes of fixed "
                "rows, got cache_values=False"
            )
            raise UsageError(msg)
        if fixed:
            return Episodes(**tensors)
        several, traj, step = keys["end_keys"], keys["traj_key"], None
        ends = keys["end_key"] if several is None else list(several)
        if self._fragmented:
            ends, several, step = None, None, self._step_key
        optional = several is not None or traj is None
        usual = list(_TRAJ_KEYS) if ends is None else None
        return Episodes(ends, usual if traj is None else traj, optional=optional, step_key=step)

    def _split(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices in a batch, and their length.

        Raises:
            UsageError: if the batch size is not a multiple of the option.
        """
        number, length = self._num_slices, self._slice_len
        part = length if number is None else number
        if part is None or batch_size % part:
            what = "slice length, slice_len" if number is None else "number of slices, num_slices"
            msg = f"The batch-size must be divisible by the {what}={part}, got batch_size={batch_size}"
            raise UsageError(msg)
        if number is None:
            return batch_size // part, part
        _checked_span(self._span, batch_size // part)
        return part, batch_size // part

    def _table_of(self, view: View) -> EpisodeTable:
        table = view.require_episodes()
        self._found = table.read_from
        return table

    def _too_short(self, length: int, table: EpisodeTable) -> EmptyBufferError:
        longest = int(table.episodes().rows.max()) if table.count else 0
        return EmptyBufferError(
            f"Did not find a single trajectory with sufficient length: of {table.rows} rows in {table.count} episodes "
            f"none has the {length} rows of a slice (the longest has {longest}): add "
            "longer episodes, shorten the slices, or allow shorter ones with strict_length=False"
        )

    def _long_enough(self, view: View, length: int) -> tuple[EpisodeTable, Starts]:
        """Return the episodes, and the rows of those that are long enough.

        Raises:
            EmptyBufferError: if there is none.
        """
        table = view.require_episodes()
        self._found = table.read_from
        starts = table.starts(length if self._strict_length else 1)
        if self._strict_length and not starts.rows:  # else each row can be in a slice
            raise self._too_short(length, table)
        return table, starts

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is not a multiple of the option.
        """
        self._long_enough(view, self._split(batch_size)[1])

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slices: their first rows and their lengths.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is not a multiple of the option.
        """
        number, length = self._split(batch_size)
        table, starts = self._long_enough(view, length)
        randoms = torch.randint(0, _TOP, (2 * number,), generator=generator, device=view.device)
        rows = starts.draw(randoms, by_episode=True)
        return Draw(rows, length=length) if self._full else self._place(rows, length, table, generator)

    def _place(self, rows: Tensor, length: int, table: EpisodeTable, generator: torch.Generator | None) -> Draw:
        """Place one slice in the episode of each row; see `EpisodeTable.place_slices`."""
        randoms = torch.randint(0, _TOP, rows.shape, generator=generator, device=rows.device)
        left, right = self._span
        span = (length - 1 if left is True else int(left), length - 1 if right is True else int(right))
        firsts, lengths = table.place_slices(rows, length, span, randoms)
        return Draw(firsts, lengths=lengths, pad=self._pad(table, length) if self._pad_output else 0)

    def _pad(self, table: EpisodeTable, length: int) -> int:
        """Return the rows that slices are padded to, if some of this length may be shorter; else 0."""
        return length if any(self._span) or table.starts(length).episodes < table.count else 0

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:
        """Return the flags of the slices by path, `[R, 1]` or in the shape of the stored ones; see `SliceSampler`."""
        out: dict[Path, Tensor] = {}
        path = self._truncated
        if path is not None:
            last = plan.last_of_each().view(-1, 1)
            done, terminated = (*path[:-1], "done"), (*path[:-1], "terminated")
            stored, held = kinds.find_field(data, done), kinds.find_field(data, terminated)
            out[path] = last.clone() if stored is None else _spread(last, stored).expand_as(stored).clone()
            out[done] = last.clone() if stored is None else _set_where(last, stored)
            out[terminated] = torch.zeros_like(last) if held is None else held.clone()
        initial = None if self._init is None else kinds.find_field(data, self._init)
        if initial is not None and self._init is not None:
            out[self._init] = _set_where(plan.first_of_each(), initial)
        return out

    @property
    def form(self) -> str:
        """The options that a state must agree with, as text."""
        names = ("num_slices", "slice_len", "strict_length", "pad_output", "span")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def state_dict(self) -> dict[str, Any]:
        """Return the options that a state must agree with."""
        return {"slices": self.form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: ARG002
        """Compare the options with those of a state.

        Raises:
            CheckpointError: if they differ.
        """
        require_options(self, {"form": state["slices"]}, ("form",))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the options with those of a state; see `check_state`."""
        require_options(self, {"form": state["slices"]}, ("form",))


@final
class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices in passes: in each pass, every episode that is long enough is drawn exactly once.

    The start within the episode is uniform. Writing to the buffer begins a new pass, and so does a batch with slices of
    another length (`num_slices`). The last batch of a pass has the slices that are left, unless `drop_last`. An
    instance of both base classes, as in TorchRL.

    Args:
        num_slices: see `SliceSampler`, also for `slice_len`.
        drop_last: leave out the last batch of a pass if it has fewer slices.
        shuffle: False draws the episodes in the order of their age.
        **options: see `SliceSampler`; `cache_values` is True by default.

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
        shuffle: bool = True,
        **options: Unpack[SliceOptions],
    ) -> None:
        SamplerWithoutReplacement.__init__(self, drop_last, shuffle, replacement=options.pop("replacement", False))
        options.setdefault("cache_values", True)
        SliceSampler.__init__(self, num_slices=num_slices, slice_len=slice_len, **options)
        self._firsts = torch.empty(0, dtype=torch.int64, device="cpu")
        self._seen, self._length = -1, 0

    def __repr__(self) -> str:
        """Options, and episodes drawn in this pass."""
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
        number, length = self._split(batch_size)
        fresh = (view.ring.written, length) != (self._seen, self._length)
        firsts = self._find(view, number, length, None if fresh else self._firsts)
        if fresh:  # only now: a draw that raises leaves the pass as it was
            SamplerWithoutReplacement.restart(self)
            self._firsts, self._seen, self._length = firsts, view.ring.written, length
        # the rows of this view are the episodes of the pass, numbered by age
        episodes = view._replace(rows=firsts.shape[0], capacity=firsts.shape[0], starts=None)
        picked = SamplerWithoutReplacement.draw(self, episodes, number, generator).slots
        return self._place(firsts[picked], length, view.require_episodes(), generator)

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            TooFewRowsError: with `drop_last`, if there are fewer episodes than slices in a batch.
            UsageError: if the batch size is not a multiple of the option.
        """
        self._find(view, *self._split(batch_size))

    def _find(self, view: View, number: int, length: int, firsts: Tensor | None = None) -> Tensor:
        """Return the first rows of the episodes that are long enough, int64 `[n]`; those given, if they are known.

        Raises:
            EmptyBufferError: if there is none.
            TooFewRowsError: with `drop_last`, if there are fewer than slices in a batch.
        """
        least = length if self._strict_length else 1
        if firsts is None:
            table = self._table_of(view)
            spans = table.episodes()
            firsts = spans.first[spans.rows >= least].to(view.device)
            if not firsts.shape[0]:
                raise self._too_short(length, table)
        if self.drop_last and firsts.shape[0] < number:
            msg = (
                f"The batch size ({number} slices) is greater than the storage capacity with drop_last=True: there are "
                f"{firsts.shape[0]} episodes of {least} rows or more: add some or lower batch_size"
            )
            raise TooFewRowsError(msg)
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
class PrioritizedSliceSampler(PrioritizedSampler, SliceSampler):
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
        num_slices: see `SliceSampler`, also for `slice_len`.
        **options: see `SliceSampler`. `span` lets slices end early at the end of their episode: True by any number of
            rows, a number by at most so many. The left side has no effect, and warns.

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

    row_values = PrioritizedSampler.row_values

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
        max_priority_within_buffer: bool = False,
        **options: Unpack[SliceOptions],
    ) -> None:
        PrioritizedSampler.__init__(self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        SliceSampler.__init__(self, num_slices=num_slices, slice_len=slice_len, **options)
        left, right = self._span
        if left:
            warnings.warn(
                "Left spanning is disabled for PrioritizedSliceSampler, which draws the first row of a slice: the left "
                "side of span has no effect",
                UserWarning,
                stacklevel=2,
            )
            self._span = (False, right)
            self._full = self._strict_length and not right
        self._length = self._slice_len

    def __repr__(self) -> str:
        """Options and rows."""
        return (
            f"PrioritizedSliceSampler(num_slices={self._num_slices}, slice_len={self._slice_len}, "
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
        need = 1 if length is None or self._span[1] is True else max(1, length - int(self._span[1]))  # rows of a slice
        return None if need == 1 and not table.masked else table.starts(need)

    def _completed(self, slots: Tensor, starts: EligibleRows, episodes: EpisodeTable) -> Tensor:
        older = super()._completed(slots, starts, episodes)
        if self._strict_length:
            return older
        episodes.track_firsts()
        return torch.cat((older, episodes.moved_firsts(slots.device)))

    def _allowed(self, slots: Tensor, view: View) -> Tensor | None:
        """Return which rows have room for a slice; without `strict_length` also the first row of each episode."""
        allowed = super()._allowed(slots, view)
        if allowed is None or self._strict_length:
            return allowed
        return allowed | (view.require_episodes().behind(slots) == 0)

    def begin(self, view: View) -> None:
        """Give the rows present the default priority, except those with a priority from a state."""
        if view.rows and not self._strict_length:
            view.require_episodes().track_firsts()
        super().begin(view)

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
            rows = starts.rows if self._strict_length else table.rows
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
        return drawn._replace(lengths=lengths, pad=self._pad(table, length) if self._pad_output else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the priorities, and the length of the last slices."""
        return {**super().state_dict(), "length": self._length, "slices": self.form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check a state before it is loaded; see `PrioritizedSampler`."""
        require_options(self, {"form": state["slices"]}, ("form",))
        length = state["length"]
        require(length is None or (type(length) is int and length >= 1), f"its slices have {length!r} rows")
        super().check_state(state, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `PrioritizedSampler`."""
        super().load_state_dict(state)
        self._length = state["length"]


@final
class StreamingSliceSampler(SliceSampler):
    """Draws the slices that were just written, each once and in the order of writing, then slices of all episodes.

    As rows are written, each episode is divided into windows of `slice_len` rows, from its first row on and without
    overlap; rows at its end that do not fill a window are in none. A window is queued when its last row is written. A
    batch takes windows from the queue, the oldest first, and fills up with uniform draws of `SliceSampler`, which do
    not empty the queue. A window is dropped if one of its rows was replaced before it was drawn. Batches that are
    dropped (`prefetch`, a new sampler) take their windows with them. An instance of `SliceSampler`, as in TorchRL.

    Rows that a storage held before the buffer was made are in no window. Rows with `traj_key` may be interleaved: a
    window has rows of one episode. Cost: of a write O(rows) more, of a draw O(slices). Memory: 4 bytes for each slot.

    Args:
        slice_len: rows of a slice.
        **options: see `SliceSampler`; `replacement` must be True.

    Raises:
        KindError: if `slice_len` is no integer.
        OptionError: if it is below 1.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, StreamingSliceSampler
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=StreamingSliceSampler(slice_len=3), batch_size=6)
        >>> _ = rb.extend({"value": torch.arange(6), "done": torch.zeros(6, dtype=torch.bool)})
        >>> rb.sample()["value"].view(2, 3)
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """

    watches = True
    row_values = ("places",)

    def __init__(self, *, slice_len: int, **options: Unpack[SliceOptions]) -> None:
        self._rows_each = check_integer("slice_len", slice_len, 1)
        super().__init__(slice_len=self._rows_each, **options)
        self._queue: deque[tuple[int, int]] = deque()  # first slot of each window, and the arrival of its row
        self._places: NDArray[np.int32] = np.zeros(0, np.int32)  # of each row in its window; -1 in none

    @property
    def nbytes(self) -> int:
        """Bytes of the positions of rows in their windows."""
        return self._places.nbytes

    def check_parts(self, storage: StorageShape, writer: WriterOrder) -> None:  # noqa: ARG002
        """Check that the storage has one dimension.

        Raises:
            UsageError: if it has two.
        """
        if storage.ndim != 1:
            msg = f"StreamingSliceSampler requires a one-dimensional storage, got ndim={storage.ndim}: use ndim=1"
            raise UsageError(msg)

    def watch(self, placement: Placement, view: View) -> None:
        """Queue the windows that rows just written complete."""
        if not isinstance(placement, Run):
            return  # episodes need rows in ring order, so that all placements are runs
        table = view.require_episodes()
        slots = placement.slots()
        self._places = grown(self._places, int(slots.max()) + 1, -1)
        self._places[slots.numpy()] = -1
        slots = slots[table.ahead(slots) >= 0]  # without masked rows
        behind, before = table.behind(slots), table.shift(slots, -1)
        ends = self._place_rows(slots.tolist(), behind.tolist(), before.tolist())
        if ends:
            firsts = table.shift(torch.tensor(ends, dtype=torch.int64, device="cpu"), 1 - self._rows_each)
            arrivals = view.ring.arrivals(firsts.to(view.device)).tolist()
            self._queue.extend(zip(firsts.tolist(), arrivals, strict=True))
        while len(self._queue) > max(1, view.capacity // self._rows_each):  # the oldest ones were replaced
            self._queue.popleft()

    def _place_rows(self, slots: list[int], behind: list[int], before: list[int]) -> list[int]:
        """Set the position of each new row in its window; return the rows that are the last ones of theirs.

        Args:
            slots: of the rows, in the order of writing.
            behind: rows present before each in its episode.
            before: slots of the rows before these; their own where there is none.
        """
        places, ends = self._places, []
        for slot, back, last in zip(slots, behind, before, strict=True):
            place = int(places[last]) + 1
            # else it is the first row, or rows of its window were replaced
            places[slot] = place = place % self._rows_each if back >= max(place, 1) else 0
            if place == self._rows_each - 1 <= back:
                ends.append(slot)
        return ends

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw queued windows, then slices of `SliceSampler` for the rest of the batch.

        Raises:
            EmptyBufferError: if no window is queued, and no episode is long enough.
            UsageError: if the batch size is not a multiple of `slice_len`.
        """
        number, length = self._split(batch_size)
        fresh = self._take(view, number)
        missing = number - fresh.shape[0]
        if not missing:
            lengths = torch.full_like(fresh, length)
            return Draw(fresh, lengths=lengths, pad=length) if self._pad_output else Draw(fresh, length=length)
        rest = super().draw(view, missing * length, generator)
        if missing == number:
            return rest
        slots = torch.cat((fresh, rest.slots))
        if rest.lengths is None:
            return rest._replace(slots=slots)
        lengths = torch.cat((torch.full_like(fresh, length), rest.lengths))
        return rest._replace(slots=slots, lengths=lengths)

    def _pad(self, table: EpisodeTable, length: int) -> int:  # noqa: ARG002
        """Return the length with `pad_output`: queued windows have a mask, and so do the slices of the same batch."""
        return length

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise."""
        number = self._split(batch_size)[0]
        entries = list(self._queue)
        if sum(self._valid(view, entries).tolist()) < number:
            super().check_draw(view, batch_size)

    def _take(self, view: View, number: int) -> Tensor:
        """Remove up to `number` windows whose rows are all present from the queue; return their first slots."""
        found: list[int] = []
        while self._queue and len(found) < number:
            entries = list(islice(self._queue, number - len(found)))
            found += [slot for (slot, _), ok in zip(entries, self._valid(view, entries).tolist(), strict=True) if ok]
            for _ in entries:
                self._queue.popleft()
        return torch.tensor(found, dtype=torch.int64, device=view.device)

    def _valid(self, view: View, entries: list[tuple[int, int]]) -> Tensor:
        """Return bool `[n]`: which windows have all of their rows, in one episode."""
        slots, arrivals = torch.tensor(entries, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
        there = slots < view.rows
        known = torch.where(there, slots, 0)
        same = view.ring.arrivals(known.to(view.device)).cpu() == arrivals
        return there & same & (view.require_episodes().ahead(known) >= self._rows_each - 1)

    def clear(self) -> None:
        """Forget all windows."""
        self._queue.clear()
        self._places = self._places[:0]

    def state_dict(self) -> dict[str, Any]:
        """Return the queue, and the position of each row in its window. Copy."""
        queue = torch.tensor(list(self._queue), dtype=torch.int64, device="cpu").reshape(-1, 2)
        return {
            **super().state_dict(),
            "slice_len": self._rows_each,
            "queue": queue,
            "places": torch.from_numpy(self._places.copy()),
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check a state before it is loaded.

        Raises:
            CheckpointError: if it is damaged, or its options differ.
        """
        super().check_state(state, rows)
        queue, places = state["queue"], state["places"]
        good = (
            (queue.dtype, places.dtype) == (torch.int64, torch.int32)
            and queue.shape == (queue.shape[0], 2)
            and places.ndim == 1
            and bool(((queue[:, 0] >= 0) & (queue[:, 0] < rows)).all())
            and bool(((places >= -1) & (places < self._rows_each)).all())
        )
        require(good, f"its windows are not those of {rows} rows")

    def move_state(self, state: dict[str, Any], order: Tensor) -> dict[str, Any]:
        """Return the state after rows were moved; windows whose first rows have left are dropped."""
        queue = state["queue"].clone()
        queue[:, 0] = new_slots(order, queue[:, 0])
        places = grown(state["places"].numpy(), int(order.max()) + 1, -1)[order.cpu().numpy()]
        return {**state, "queue": queue[queue[:, 0] >= 0], "places": torch.from_numpy(places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            UsageError: if it is of another `slice_len`.
        """
        if int(state["slice_len"]) != self._rows_each:
            msg = (
                f"Cannot restore slice_len={state['slice_len']} into a slice_len={self._rows_each} "
                "StreamingSliceSampler: make it with the same slice_len"
            )
            raise UsageError(msg)
        super().load_state_dict(state)
        self._queue = deque((slot, arrival) for slot, arrival in state["queue"].tolist())
        self._places = state["places"].numpy().copy()


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
