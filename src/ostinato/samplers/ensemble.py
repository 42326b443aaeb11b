"""The distribution by which an ensemble of buffers draws the parts of a batch from its members."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, TypedDict, final, get_args

import numpy as np
import torch

from ostinato.core.index import Group
from ostinato.core.options import check_choice, check_integer
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, UsageError
from ostinato.samplers.base import Sampler, check_replacement, require_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.samplers.standalone import BareStorage

__all__ = ["SamplerEnsemble"]

WhenEmpty: TypeAlias = Literal["renormalize", "raise", "fill"]
"""How an ensemble handles a member without rows to draw."""
Numbers: TypeAlias = "float | Sequence[float] | Tensor | np.ndarray[Any, Any]"
"""The share of the first of two members, or one number for each member."""
Ratio: TypeAlias = "Numbers | Mapping[int, Numbers] | Callable[[int], Numbers]"
"""Shares, a mapping of steps to shares, or a function of the step."""
Rounding: TypeAlias = Literal["carry", "nearest"]
"""What becomes of the fraction of a row that a share leaves in a batch."""
RatioSteps: TypeAlias = Literal["batches", "calls"]
"""What a schedule of the ratio counts."""
_SAMPLEABLE, _FUNCTION = "sampleable", "function"
_OPTIONS = ("by_ratio", "sample_from_all", "num_buffer_sampled", "rounding", "ratio_steps")
_NEARLY = 1e-6
"""A share of a batch this close to an integer is rounded: `p` may have been float32."""
_TINY = 1e-9
"""Rounding errors of a share of a batch are below it."""


class MixOptions(TypedDict, total=False):
    """Keyword arguments of `SamplerEnsemble`, for signatures that pass them on; None is the default."""

    p: Sequence[float] | Tensor | str | None
    sample_from_all: bool
    num_buffer_sampled: int | None
    when_empty: WhenEmpty | None
    ratio: Ratio | None
    rounding: Rounding | None
    ratio_steps: RatioSteps | None
    min_rows: int | Sequence[int] | None


class Split(NamedTuple):
    """How a batch is divided among members."""

    members: list[int]
    """The member of each part."""
    sizes: list[int]
    """Rows of each part."""
    carry: list[float] | None = None
    """For each member its exact share of the batch less its rows; None without an exact ratio."""


@final
class Shares:
    """The share of each member in a batch: equal, by the rows of members, constant, or following a schedule.

    Args:
        name: of the option, for messages.
        given: as `p` None for equal shares, "sampleable" for the number of rows in each member, or numbers; as `ratio`
            numbers, a mapping of steps to numbers, or a function of the step.
        members: number of members.

    Raises:
        KindError, OptionError: if it is nothing of this.
    """

    def __init__(self, name: str, given: Any, members: int) -> None:
        self._name, self.given, self._members = name, given, members
        self.points: list[tuple[int, list[float]]] | None = None
        """Steps, and the shares at these; None where these are computed at each draw."""
        if name == "p" and isinstance(given, str) and given != _SAMPLEABLE:
            msg = f"The only dynamic SamplerEnsemble probability is 'sampleable', got p={given!r}: or give numbers"
            raise OptionError(msg)
        if name == "ratio" and isinstance(given, Mapping):
            self.points = sorted((_step(step), _shares(name, value, members)) for step, value in given.items())
            if not self.points:
                msg = "ratio is an empty mapping: give at least one step, with one number for each member"
                raise OptionError(msg)
        elif not (callable(given) if name == "ratio" else isinstance(given, str)):
            self.points = [(0, [1 / members] * members if given is None else _shares(name, given, members))]

    def at(self, step: int, rows: Sequence[int] = ()) -> list[float]:
        """Return the shares at a step, of sum 1, of members with so many rows.

        Raises:
            EmptyBufferError: if no member has rows, and shares follow these.
            KindError, OptionError: if the function of the schedule returns something else.
        """
        if self.points is not None and len(self.points) == 1:
            return list(self.points[0][1])
        if self.points is not None:
            steps, shares = zip(*self.points, strict=True)
            return [float(np.interp(step, steps, column)) for column in zip(*shares, strict=True)]
        if not isinstance(self.given, str):
            return _shares(f"ratio at step {step}", self.given(step), self._members)
        total = sum(rows)
        if total == 0:
            msg = "Cannot sample from an empty storage: no member of the ensemble holds rows; add some first"
            raise EmptyBufferError(msg)
        return [count / total for count in rows]

    def subset(self, chosen: list[int]) -> Shares:
        """Return the shares among some of the members.

        Raises:
            OptionError: if the shares of all of them are 0.
        """
        given: Any = self.given
        if self.points is not None and given is not None:
            given = {step: [shares[i] for i in chosen] for step, shares in self.points}
            given = given if self._name == "ratio" else given[0]
        elif callable(given):
            given = partial(_some, given, self._members, chosen)
        return Shares(self._name, given, len(chosen))

    def state(self) -> Any:
        """Return the shares for a checkpoint: None, "sampleable", "function", or pairs of a step and the shares."""
        if self.given is None or isinstance(self.given, str):
            return self.given
        return _FUNCTION if self.points is None else [list(point) for point in self.points]

    def loaded(self, state: Any) -> Shares:
        """Return the shares of a state; they are not divided by their sum again, which would change the last digits.

        Raises:
            CheckpointError: if they are not such shares, of so many members.
        """
        if (state == _FUNCTION) != callable(self.given):
            msg = (
                f"the shares of the checkpoint are {state!r:.80}, those of this ensemble are {self.given!r:.80}: "
                "functions are not saved, give the same one again"
            )
            raise CheckpointError(msg)
        if state == _FUNCTION:
            return self
        try:
            points = sorted((_step(step), shares) for step, shares in state) if isinstance(state, list) else None
            given = state if points is None else dict(points) if self._name == "ratio" else points[0][1]
            made = Shares(self._name, given, self._members)
        except (OptionError, KindError, TypeError, ValueError, IndexError) as error:
            msg = f"the checkpoint's mixing weights do not fit this ensemble: {error}"
            raise CheckpointError(msg) from None
        if any(abs(sum(shares) - 1) > _NEARLY for _, shares in points or ()):
            msg = f"the checkpoint's mixing weights {state!r:.80} are no shares of 1: it is damaged"
            raise CheckpointError(msg)
        made.points = made.points if points is None else points
        return made


def split_rows(size: int, shares: Sequence[float], carry: Sequence[float]) -> tuple[list[int], list[float]]:
    """Divide a batch row by row; return the rows of each member, and what each is still owed.

    Args:
        size: rows of the batch.
        shares: of sum 1; 0 for members that are left out, whose carry stays as it is.
        carry: rows that earlier batches owe to each member, in sum 0.
    """
    counts = [math.floor(size * share + _TINY) for share in shares]
    parts = [size * share - count for share, count in zip(shares, counts, strict=True)]
    due = [i for i, part in enumerate(parts) if part > _TINY]
    due.sort(key=lambda i: -round(carry[i] + parts[i], 9))
    for i in due[: size - sum(counts)]:
        counts[i] += 1
        parts[i] -= 1
    return counts, parts


@final
class SamplerEnsemble(Group[Sampler]):
    """The samplers of a `ReplayBufferEnsemble`, and the distribution by which it mixes its members.

    A batch consists of `num_buffer_sampled` parts of equal size `n`, each from one member. With `sample_from_all` every
    member gives one part. Else member `i` gives `floor(n * p_i)` or `ceil(n * p_i)` parts, in expectation exactly
    `n * p_i`: where `n * p_i` is an integer, every batch has exactly that many. The members of the remaining parts
    are drawn by systematic sampling (Madow 1949) over members in a random order; the order of the parts is random.

    A member without a row that can be drawn (it is empty, or none of its episodes is long enough) is excluded until it
    has one: the weights of the other members are divided by their sum, with one warning. With `sample_from_all` the
    other members then have equal weights. `when_empty="raise"` raises instead.

    With `ratio` a batch is divided row by row, not into equal parts: of `B` rows a member of the share `f` gives
    `B * f`, the rows of the first member first. Where that is no integer it gives `floor(B * f)` or `ceil(B * f)`: what
    is left of a row counts for the next batch, so that after every batch each of two members has given the sum of its
    `B * f` up to half a row (error diffusion; of more members up to a few rows). No random numbers are used for it, and
    the carry is part of checkpoints. Members that draw slices give whole slices.

    Args:
        *samplers: at least one.
        p: weights of the members, finite numbers of at least 0, which are divided by their sum; None for equal ones;
            `"sampleable"` for the number of rows in each member. A member of weight 0 is never drawn.
        sample_from_all: one part from every member; excludes `p`.
        num_buffer_sampled: parts of a batch; None is the number of members.
        when_empty: "renormalize" excludes members without rows from a batch, "raise" raises EmptyBufferError for them.
            With `p="sampleable"` they always have the weight 0. "fill" is "renormalize" without a warning, and if only
            members of weight 0 have rows, all rows come from the first of these.
        ratio: share of each member in every batch; excludes `p`, `sample_from_all` and `num_buffer_sampled`. One number
            of at least 0 for each member, divided by their sum; or for two members one number, the share of the first.
            A schedule is a mapping of step numbers to these, with straight lines in between and constant outside; or a
            function `step -> shares`, called with 0 at first, under the lock of the ensemble.
        rounding: "carry" as above, or "nearest": each batch is rounded on its own, `round(B * f)`, as TorchRL's
            `OfflineToOnlineReplayBuffer` does it; shares are then exact only where `B * f` is an integer.
        ratio_steps: what a schedule counts: "batches" that were drawn (with prefetch, ahead), or "calls" of `step`.
        min_rows: rows that a member must hold to be drawn from, for all or one number for each; with fewer it counts as
            empty. With 1, rows of a small member are repeated to make its share.
        replacement: must be True; samplers without replacement are given as members.

    Raises:
        KindError: if an argument is not a sampler, or an option of the wrong type.
        OptionError: if an option is out of range.
        UsageError: if `p` is given with `sample_from_all`, or one of them with `ratio`.

    Examples:
        >>> from ostinato import RandomSampler, SamplerEnsemble
        >>> mix = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[3, 1], num_buffer_sampled=4)
        >>> sorted(mix.choose([100, 100], None))
        [0, 0, 0, 1]
        >>> mix = SamplerEnsemble(RandomSampler(), RandomSampler(), ratio=0.3)
        >>> mix.plan(256, [100, 100], None).sizes
        [77, 179]
    """

    epochal = counting = by_age = False
    """Batches have no end, as samplers of single buffers have it: passes of the members begin again."""

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        when_empty: WhenEmpty = "renormalize",
        ratio: Ratio | None = None,
        rounding: Rounding = "carry",
        ratio_steps: RatioSteps = "batches",
        min_rows: int | Sequence[int] = 1,
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        super().__init__(samplers, Sampler)
        self.when_empty = check_choice("when_empty", when_empty, get_args(WhenEmpty))
        self._warned = False
        self.min_rows = _least_rows(min_rows, len(samplers))
        if ratio is not None and (p is not None or sample_from_all or num_buffer_sampled is not None):
            msg = (
                f"ratio= divides a batch row by row, and p={p!r}, sample_from_all={sample_from_all} and "
                f"num_buffer_sampled={num_buffer_sampled} into equal parts: give one or the other"
            )
            raise UsageError(msg)
        if ratio is None and (rounding, ratio_steps) != ("carry", "batches"):
            msg = f"rounding={rounding!r} and ratio_steps={ratio_steps!r} belong to a ratio: give ratio="
            raise OptionError(msg)
        self.rounding = check_choice("rounding", rounding, get_args(Rounding))
        self.ratio_steps = check_choice("ratio_steps", ratio_steps, get_args(RatioSteps))
        self.by_ratio = ratio is not None
        """Whether batches are divided row by row, not into equal parts."""
        self._step, self._carry = 0, [0.0] * len(samplers)
        self._shares = Shares("ratio", ratio, len(samplers))
        if sample_from_all and p is not None:
            msg = (
                "Cannot pass both `p` argument and `sample_from_all=True`: the latter takes equal parts from all "
                f"members, got p={p!r}: leave one of them out"
            )
            raise UsageError(msg)
        self.sample_from_all = bool(sample_from_all)
        parts = len(samplers) if num_buffer_sampled is None else num_buffer_sampled
        self.num_buffer_sampled = check_integer("num_buffer_sampled", parts, 1)
        if sample_from_all and self.num_buffer_sampled != len(samplers):
            msg = (
                f"sample_from_all=True takes one part from each of the {len(samplers)} members, got "
                f"num_buffer_sampled={parts}: leave it out"
            )
            raise OptionError(msg)
        if ratio is None:
            self.p = p

    def __repr__(self) -> str:
        """Show the samplers and the distribution."""
        members = ", ".join(map(repr, self.members))
        empty = "" if self.when_empty == "renormalize" else f", when_empty={self.when_empty!r}"
        empty += "" if set(self.min_rows) == {1} else f", min_rows={list(self.min_rows)}"
        points, p = self._shares.points, self.p
        if self.by_ratio:
            constant = points is not None and len(points) == 1
            shown = ", ".join(f"{share:.6g}" for share in self._shares.at(0)) if constant else ""
            shown = f"ratio=[{shown}]" if constant else f"ratio=schedule at step {self._step}"
            shown += "" if self.rounding == "carry" else f", rounding={self.rounding!r}"
            shown += "" if self.ratio_steps == "batches" else f", ratio_steps={self.ratio_steps!r}"
        else:
            shown = repr([round(share, 6) for share in p.tolist()] if isinstance(p, torch.Tensor) else p)
            shown = "sample_from_all=True" if self.sample_from_all else f"p={shown}"
            shown += f", num_buffer_sampled={self.num_buffer_sampled}"
        return f"SamplerEnsemble({members}, {shown}{empty})"

    @property
    def p(self) -> Tensor | str | None:
        """Share of each member, float64 `[members]`, of sum 1; None for equal ones. May be set at any time."""
        given, points = self._shares.given, self._shares.points
        if self.by_ratio or given is None:
            return None
        return given if points is None else torch.tensor(points[0][1], dtype=torch.float64, device="cpu")

    @p.setter
    def p(self, value: Sequence[float] | Tensor | str | None) -> None:
        if value is not None and self.sample_from_all:
            msg = "an ensemble with sample_from_all=True takes equal parts from all members: p cannot be set"
            raise OptionError(msg)
        if value is not None and self.by_ratio:
            msg = "this ensemble divides batches by its ratio: set ratio, not p"
            raise OptionError(msg)
        if not self.by_ratio:
            self._shares = Shares("p", value, len(self.members))

    @property
    def ratio(self) -> list[float] | None:
        """Share of each member in the next batch, of sum 1; None without a ratio.

        May be set at any time to what the constructor takes as `ratio`, if the ensemble was made with one; steps and
        carry go on.
        """
        return self._shares.at(self._step) if self.by_ratio else None

    @ratio.setter
    def ratio(self, value: Ratio) -> None:
        self._require_ratio("ratio")
        self._shares = Shares("ratio", value, len(self.members))

    @property
    def share(self) -> float | None:
        """Share of the first of two members in the next batch; None without a ratio. May be set: a scheduler can."""
        return self._shares.at(self._step)[0] if self.by_ratio else None

    @share.setter
    def share(self, value: float) -> None:
        self._require_ratio("share")
        self.ratio = value

    @property
    def ratio_step(self) -> int | None:
        """Steps that the schedule of the ratio has counted; None without a ratio."""
        return self._step if self.by_ratio else None

    def step(self, steps: int = 1) -> None:
        """Go on by some steps in the schedule of the ratio.

        Raises:
            UsageError: unless the ensemble was made with `ratio_steps="calls"`.
            OptionError: if it is not an integer of at least 0.
        """
        self._require_ratio("step")
        if self.ratio_steps != "calls":
            msg = 'each batch is a step of this ratio: make the ensemble with ratio_steps="calls" to count calls'
            raise UsageError(msg)
        self._step += _step(steps)

    def _require_ratio(self, name: str) -> None:
        if not self.by_ratio:
            msg = f"{name} belongs to an ensemble with a ratio, and this one draws equal parts: make it with ratio="
            raise UsageError(msg)

    @property
    def grain(self) -> int:
        """Rows that members give together with a ratio: the length of slices, 1 where none are drawn.

        Raises:
            OptionError: if the length of slices would change with the share.
        """
        lengths = [1]
        for i, sampler in enumerate(self.members if self.by_ratio else ()):
            length = getattr(sampler, "slice_len", 1) if sampler.slices else 1
            if length is None:
                msg = (
                    f"member {i} draws slices whose length depends on the rows of its share ({sampler!r}): give "
                    "slice_len, not num_slices"
                )
                raise OptionError(msg)
            lengths.append(length)
        return math.lcm(*lengths)

    def asked(self, batch_size: int) -> list[int]:
        """Return the rows that each member may be asked for in the next batch if all have rows, at least a slice.

        Raises:
            OptionError: if a batch cannot be divided so.
        """
        size = self.part_rows(batch_size)
        if not self.by_ratio:
            return [size] * len(self.members)
        counts, _ = self._split(size, self._shares.at(self._step))
        return [self.grain * max(1, count) for count in counts]

    def part_rows(self, batch_size: int) -> int:
        """Return the rows of each part of a batch; with a ratio the number of its rows or slices.

        Raises:
            OptionError: if a batch cannot be divided so.
        """
        equal = not self.by_ratio
        parts = self.num_buffer_sampled if equal else self.grain
        if batch_size < parts or batch_size % parts:
            name = "num_buffer_sampled" if equal else "slice_len"
            msg = f"The batch size must be divisible by {name}={parts}, got {batch_size}"
            raise OptionError(msg)
        return batch_size // parts

    def plan(self, batch_size: int, rows: Sequence[int], generator: torch.Generator | None) -> Split:
        """Divide the next batch among the members; steps and carry of a ratio change with `drew` only.

        Args:
            batch_size: rows of the batch.
            rows: rows in each member now; 0 if none of them can be drawn.
            generator: see `choose`; not used with a ratio.

        Returns:
            The member and the size of each part.

        Raises:
            OptionError: if the batch cannot be divided so.
            EmptyBufferError: see `choose`.
        """
        size = self.part_rows(batch_size)
        if not self.by_ratio:
            chosen = self.choose(rows, generator)
            return Split(chosen, [size] * len(chosen))
        counts, carry = self._split(size, self._present(rows)[0])
        chosen = [i for i, count in enumerate(counts) if count]
        return Split(chosen, [self.grain * counts[i] for i in chosen], carry)

    def drew(self, carry: list[float] | None, batches: int = 1) -> None:
        """Count a batch of `plan` that was drawn, by what it left; with -1 take back one that was dropped."""
        if self.by_ratio and carry is not None:
            self._carry = [have + batches * more for have, more in zip(self._carry, carry, strict=True)]
            if self.ratio_steps == "batches":
                self._step = max(0, self._step + batches)

    def _split(self, size: int, shares: list[float]) -> tuple[list[int], list[float]]:
        """Return the rows of each member in a batch, and what each is owed after it; changes nothing."""
        if self.rounding == "carry":
            return split_rows(size, shares, self._carry)
        ends = [0, *(round(sum(shares[: i + 1]) * size) for i in range(len(shares) - 1)), size]
        return np.diff(ends).tolist(), [0.0] * len(shares)

    def choose(self, rows: Sequence[int], generator: torch.Generator | None) -> list[int]:
        """Draw which members the parts of the next batch come from.

        Args:
            rows: rows in each member now; 0 if none of them can be drawn.
            generator: the only source of random numbers; None stands for torch's global one.

        Returns:
            `num_buffer_sampled` numbers of members.

        Raises:
            EmptyBufferError: if no member that may be drawn has rows, with `when_empty="raise"` if one of them has
                none; nothing is drawn then.
        """
        if self.by_ratio:
            msg = "an ensemble with a ratio divides batches row by row: call plan()"
            raise UsageError(msg)
        shares, whole = self._present(rows)
        if whole and self.sample_from_all:
            return list(range(len(self.members)))
        return _systematic(shares, self.num_buffer_sampled, generator)

    def _present(self, rows: Sequence[int], *, warn: bool = True) -> tuple[list[Any], bool]:
        """Return the shares of the next batch, 0 for members that cannot be drawn, and whether all of them can."""
        rows = [count if count >= least else 0 for count, least in zip(rows, self.min_rows, strict=True)]
        shares = self._shares.at(self._step, rows)
        lacking = [i for i, share in enumerate(shares) if share > 0 and rows[i] == 0]
        return (self._without(lacking, shares, rows, warn=warn), False) if lacking else (shares, True)

    def sample(
        self, storage: Sequence[BareStorage], batch_size: int, *, generator: torch.Generator | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw rows of bare storages, without a `ReplayBufferEnsemble`; see `Sampler.sample`.

        Args:
            storage: the members' storages, such as a `StorageEnsemble`.
            batch_size: rows to draw, without a ratio a multiple of `num_buffer_sampled`.
            generator: the only source of random numbers; None stands for torch's global one.

        Returns:
            What `StorageEnsemble.get` takes, and the info. The former has `buffer_ids`, the member of each part, int64
            `[parts]`, and `index`, `[parts, n]`; a list of indices where these have several dimensions or lengths. The
            info has `parts`, the infos of the parts.

        Raises:
            OptionError: if the batch size is not divisible, or there is another number of storages.
            EmptyBufferError: see `choose`.
        """
        split = self.plan(batch_size, self._able(storage, batch_size), generator)
        chosen, storages = split.members, list(storage)
        parts = zip(chosen, split.sizes, strict=True)
        drawn = [self.members[i].sample(storages[i], size, generator=generator) for i, size in parts]
        self.drew(split.carry)
        index = [found[0] if isinstance(found, tuple) and len(found) == 1 else found for found, _ in drawn]
        rows = [found for found in index if isinstance(found, torch.Tensor)]
        same = len(rows) == len(index) and len({found.shape for found in rows}) == 1
        members = torch.tensor(chosen, dtype=torch.int64, device="cpu")
        return {"index": torch.stack(rows) if same else index, "buffer_ids": members}, {
            "parts": [info for _, info in drawn]
        }

    def can_sample(self, storage: Sequence[BareStorage], batch_size: int) -> bool:
        """Return whether `sample` can draw a batch now: with `sample_from_all` from all members, else from one."""
        try:
            able = self._able(storage, batch_size)
        except OptionError:
            return False
        return all(able) if self.sample_from_all else self.ready(able)

    def _able(self, storage: Sequence[BareStorage], batch_size: int) -> list[int]:
        """Return the rows of each storage, 0 where its part of a batch cannot be drawn now.

        Raises:
            OptionError: see `sample`.
        """
        if len(storage) != len(self.members):
            msg = f"there must be one storage for each of the {len(self.members)} samplers, got {len(storage)}"
            raise OptionError(msg)
        parts = zip(self.members, storage, self.asked(batch_size), strict=True)
        return [len(x) if member.can_sample(x, rows) else 0 for member, x, rows in parts]

    def ready(self, rows: Sequence[int]) -> bool:
        """Return whether `plan` would not raise for members with so many rows that can be drawn."""
        try:
            self._present(rows, warn=False)
        except EmptyBufferError:
            return False
        return True

    def _without(self, lacking: list[int], shares: list[Any], rows: Sequence[int], *, warn: bool) -> list[Any]:
        """Return the shares of a batch without some members, of sum 1.

        Raises:
            EmptyBufferError: if there are no other members, or with `when_empty="raise"`.
        """
        left = [0 * share if i in lacking else share for i, share in enumerate(shares)]
        total = sum(left)
        if self.when_empty == "fill" and total <= 0 and any(rows):
            first = next(i for i, count in enumerate(rows) if count)
            left = [share + (i == first) for i, share in enumerate(left)]
            total = sum(left)
        if self.when_empty == "raise" or total <= 0:
            few = f", or fewer than min_rows={list(self.min_rows)}" if max(self.min_rows) > 1 else ""
            others = few if total > 0 else f"{few}, and no other member has p > 0"
            msg = (
                f"Cannot sample from an empty storage: members {lacking} of the ensemble have no rows to draw{others}; "
                "add some first"
            )
            raise EmptyBufferError(msg)
        if warn and not self._warned and self.when_empty != "fill":
            self._warned = True
            warnings.warn(
                f"members {lacking} of the ensemble have no rows to draw: batches come from the other members, in the "
                f"ratio {[round(float(share / total), 6) for share in left]}, until these have some. Set "
                'when_empty="raise" to raise instead. This warning is shown once',
                UserWarning,
                stacklevel=2,
            )
        return [share / total for share in left]

    def subset(self, chosen: list[int]) -> Self:
        """Return an ensemble of some of the samplers, with the same ratio of shares and number of parts."""
        members, least = [self.members[i] for i in chosen], [self.min_rows[i] for i in chosen]
        parts: dict[str, Any] = {"sample_from_all": self.sample_from_all}
        if not (self.sample_from_all or self.by_ratio):
            parts["num_buffer_sampled"] = self.num_buffer_sampled
        some = type(self)(*members, when_empty=self.when_empty, min_rows=least, **parts)
        some.by_ratio, some._step = self.by_ratio, self._step  # noqa: SLF001 (the same class)
        some._shares = self._shares.subset(chosen)  # noqa: SLF001
        some.rounding, some.ratio_steps = self.rounding, self.ratio_steps
        return some

    def state_dict(self) -> dict[str, Any]:
        """Return the distribution; the states of the members belong to their buffers. Functions are not part of it."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {**options, "shares": self._shares.state(), "step": self._step, "carry": self._carry}

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state is of the same distribution; `p` and numbers of `ratio` may differ: they may be set.

        Raises:
            CheckpointError: naming what differs.
        """
        require_options(self, state, _OPTIONS)
        self._shares.loaded(state["shares"])
        step, carry = state["step"], state["carry"]
        if type(step) is not int or step < 0 or len(carry) != len(self) or abs(sum(carry)) > _NEARLY:
            msg = f"the checkpoint's steps and carry are not of {len(self)} members: it is of others, or damaged"
            raise CheckpointError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, including `p` and the ratio, its step and its carry."""
        self.check_state(state)
        self._shares = self._shares.loaded(state["shares"])
        self._step, self._carry = state["step"], list(state["carry"])


def _least_rows(given: Any, members: int) -> tuple[int, ...]:
    """Return the rows that each member must hold."""
    least = given if isinstance(given, list | tuple) else [given] * members
    if len(least) != members:
        msg = f"min_rows must be one integer, or one for each of the {members} members, got {given!r}"
        raise OptionError(msg)
    return tuple(check_integer("min_rows", rows, 1) for rows in least)


def _shares(name: str, value: Any, members: int) -> list[float]:
    """Return the share of each member, of sum 1."""
    given = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
    try:
        weights = np.array("none" if given is None or isinstance(given, bool) else given, dtype=np.float64)
    except (TypeError, ValueError):
        msg = f"{name} must be numbers, one for each of the {members} members, got {value!r}"
        raise KindError(msg) from None
    if not weights.ndim and name.startswith("ratio"):
        if not 0 <= weights <= 1 or members != 2:
            msg = (
                f"a single number as {name} is the share of the first of two members, in [0, 1]: got {value!r} for "
                f"{members} members; or give one number for each member"
            )
            raise OptionError(msg)
        weights = np.array([weights, 1 - weights])
    if weights.shape != (members,):
        msg = f"{name} must hold one number for each of the {members} members, got shape {list(weights.shape)}"
        raise OptionError(msg)
    total = float(weights.sum())
    if bool((weights < 0).any()) or not 0 < total < math.inf:
        msg = f"{name} must be finite numbers of at least 0, not all 0, got {weights.tolist()}"
        raise OptionError(msg)
    found: list[float] = (weights / total).tolist()
    return found


def _some(given: Callable[[int], Any], members: int, chosen: list[int], step: int) -> list[float]:
    """Return what a function gives for some of its members."""
    shares = _shares(f"ratio at step {step}", given(step), members)
    return [shares[i] for i in chosen]


def _step(value: Any) -> int:
    return check_integer("steps of a ratio", value, 0, OptionError)


def _systematic(shares: Sequence[float], parts: int, generator: torch.Generator | None) -> list[int]:
    """Draw `parts` members: [0, parts) is divided into intervals of `parts * share`, with one point drawn in each unit.

    All points have the same fraction, so an interval of length `l` contains `floor(l)` or `ceil(l)` of them. Members
    are in a random order, so that no two of them exclude each other in every batch.
    """
    device = "cpu" if generator is None else generator.device
    order: list[int] = torch.randperm(len(shares), generator=generator, device=device).tolist()
    point = float(torch.rand((), dtype=torch.float64, generator=generator, device=device))
    chosen: list[int] = []
    end = 0.0
    for member in order:
        if shares[member] <= 0:
            continue
        end += parts * shares[member]
        if abs(end - round(end)) < _NEARLY:
            end = float(round(end))
        while point < end and len(chosen) < parts:
            chosen.append(member)
            point += 1
    places: list[int] = torch.randperm(parts, generator=generator, device=device).tolist()
    return [chosen[place] for place in places]
