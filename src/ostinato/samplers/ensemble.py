"""The distribution by which an ensemble of buffers draws the parts of a batch from its members."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, final

import numpy as np
import torch

from ostinato.core.index import Group
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, UsageError
from ostinato.samplers.base import Sampler, check_replacement
from ostinato.samplers.ratio import MixingRatio, Ratio, RatioSteps, Rounding, Split, check_choice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from torch import Tensor

    from ostinato.samplers.standalone import BareStorage

__all__ = ["SamplerEnsemble"]

WhenEmpty: TypeAlias = Literal["renormalize", "raise", "fill"]
"""How an ensemble handles a member without rows to draw."""
_SAMPLEABLE = "sampleable"
_NEARLY = 1e-6
"""A share of a batch this close to an integer is rounded: `p` may have been float32."""


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
    the carry is part of checkpoints. Shares are the numbers as they are written: 0.1 is one tenth. Members that draw
    slices give whole slices.

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
            A number may be a float, an integer, a `Fraction`, or text such as `"1/3"`. A schedule is a mapping of step
            numbers to these, with straight lines in between and constant outside; or a function `step -> shares`,
            called with 0 at first, under the lock of the ensemble.
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
        check_choice("when_empty", when_empty, WhenEmpty)
        self.when_empty: WhenEmpty = when_empty
        self._warned = False
        least = min_rows if isinstance(min_rows, list | tuple) else [min_rows] * len(samplers)
        if len(least) != len(samplers):
            msg = f"min_rows must be one integer, or one for each of the {len(samplers)} members, got {min_rows!r}"
            raise OptionError(msg)
        self.min_rows = tuple(_positive("min_rows", rows) for rows in least)
        if ratio is not None and (p is not None or sample_from_all or num_buffer_sampled is not None):
            msg = (
                f"ratio= divides a batch row by row, and p={p!r}, sample_from_all={sample_from_all} and "
                f"num_buffer_sampled={num_buffer_sampled} into equal parts: give one or the other"
            )
            raise UsageError(msg)
        if ratio is None and (rounding, ratio_steps) != ("carry", "batches"):
            msg = f"rounding={rounding!r} and ratio_steps={ratio_steps!r} belong to a ratio: give ratio="
            raise OptionError(msg)
        self._ratio = None if ratio is None else MixingRatio(ratio, len(samplers), rounding, ratio_steps)
        if sample_from_all and p is not None:
            msg = (
                "Cannot pass both `p` argument and `sample_from_all=True`: the latter takes equal parts from all "
                f"members, got p={p!r}: leave one of them out"
            )
            raise UsageError(msg)
        self.sample_from_all = bool(sample_from_all)
        parts = len(samplers) if num_buffer_sampled is None else num_buffer_sampled
        self.num_buffer_sampled = _positive("num_buffer_sampled", parts)
        if sample_from_all and self.num_buffer_sampled != len(samplers):
            msg = (
                f"sample_from_all=True takes one part from each of the {len(samplers)} members, got "
                f"num_buffer_sampled={parts}: leave it out"
            )
            raise OptionError(msg)
        self.p = p

    def __repr__(self) -> str:
        """Show the samplers and the distribution."""
        shares = "sample_from_all=True" if self.sample_from_all else f"p={self._show_p()}"
        members = ", ".join(map(repr, self.members))
        empty = "" if self.when_empty == "renormalize" else f", when_empty={self.when_empty!r}"
        empty += "" if set(self.min_rows) == {1} else f", min_rows={list(self.min_rows)}"
        if self._ratio is not None:
            return f"SamplerEnsemble({members}, ratio={self._ratio!r}{empty})"
        return f"SamplerEnsemble({members}, {shares}, num_buffer_sampled={self.num_buffer_sampled}{empty})"

    @property
    def p(self) -> Tensor | str | None:
        """Share of each member, float64 `[members]`, of sum 1; None for equal ones. May be set at any time."""
        return self._p

    @p.setter
    def p(self, value: Sequence[float] | Tensor | str | None) -> None:
        if value is not None and self.sample_from_all:
            msg = "an ensemble with sample_from_all=True takes equal parts from all members: p cannot be set"
            raise OptionError(msg)
        if value is not None and self._ratio is not None:
            msg = "this ensemble divides batches by its ratio: set ratio, not p"
            raise OptionError(msg)
        if isinstance(value, str) and value != _SAMPLEABLE:
            msg = f"The only dynamic SamplerEnsemble probability is 'sampleable', got p={value!r}: or give numbers"
            raise OptionError(msg)
        self._p = value if value is None or isinstance(value, str) else _shares(value, len(self.members))

    @property
    def ratio(self) -> list[Fraction] | None:
        """Share of each member in the next batch, of sum 1; None without a ratio.

        May be set at any time to what the constructor takes as `ratio`, if the ensemble was made with one; steps and
        carry go on.
        """
        return None if self._ratio is None else self._ratio.shares()

    @ratio.setter
    def ratio(self, value: Ratio) -> None:
        self._require_ratio("ratio").set(value)

    @property
    def share(self) -> float | None:
        """Share of the first of two members in the next batch; None without a ratio. May be set: a scheduler can."""
        return None if self._ratio is None else float(self._ratio.shares()[0])

    @share.setter
    def share(self, value: float) -> None:
        self._require_ratio("share").set(value)

    @property
    def ratio_step(self) -> int | None:
        """Steps that the schedule of the ratio has counted; None without a ratio."""
        return None if self._ratio is None else self._ratio.step

    def step(self, steps: int = 1) -> None:
        """Go on by some steps in the schedule of the ratio.

        Raises:
            UsageError: unless the ensemble was made with `ratio_steps="calls"`.
            OptionError: if it is not an integer of at least 0.
        """
        self._require_ratio("step").advance(steps)

    def _require_ratio(self, name: str) -> MixingRatio:
        if self._ratio is None:
            msg = f"{name} belongs to an ensemble with a ratio, and this one draws equal parts: make it with ratio="
            raise UsageError(msg)
        return self._ratio

    @property
    def grain(self) -> int:
        """Rows that members give together with a ratio: the length of slices, 1 where none are drawn.

        Raises:
            OptionError: if the length of slices would change with the share.
        """
        lengths = [1]
        for i, sampler in enumerate(self.members if self._ratio is not None else ()):
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
        if self._ratio is None:
            return [self.part_rows(batch_size)] * len(self.members)
        counts, _ = self._ratio.split(self.part_rows(batch_size), self._ratio.shares())
        return [self.grain * max(1, count) for count in counts]

    def part_rows(self, batch_size: int) -> int:
        """Return the rows of each part of a batch; with a ratio the number of its rows or slices.

        Raises:
            OptionError: if a batch cannot be divided so.
        """
        equal = self._ratio is None
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
        if self._ratio is None:
            size = self.part_rows(batch_size)
            chosen = self.choose(rows, generator)
            return Split(chosen, [size] * len(chosen))
        counts, owed = self._ratio.split(self.part_rows(batch_size), self._present(rows)[0])
        chosen = [i for i, count in enumerate(counts) if count]
        return Split(chosen, [self.grain * counts[i] for i in chosen], owed)

    def drew(self, owed: tuple[Fraction, ...] | None, batches: int = 1) -> None:
        """Count a batch of `plan` that was drawn, by what it left owed; with -1 take back one that was dropped."""
        if self._ratio is not None and owed is not None:
            self._ratio.count(owed, batches)

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
        if self._ratio is not None:
            msg = "an ensemble with a ratio divides batches row by row: call plan()"
            raise UsageError(msg)
        shares, whole = self._present(rows)
        if whole and self.sample_from_all:
            return list(range(len(self.members)))
        return _systematic(shares, self.num_buffer_sampled, generator)

    def _present(self, rows: Sequence[int], *, warn: bool = True) -> tuple[list[Any], bool]:
        """Return the shares of the next batch, 0 for members that cannot be drawn, and whether all of them can."""
        rows = [count if count >= least else 0 for count, least in zip(rows, self.min_rows, strict=True)]
        shares = self._shares_now(rows)
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
        if len(storage) != len(self.members):
            msg = f"there must be one storage for each of the {len(self.members)} samplers, got {len(storage)}"
            raise OptionError(msg)
        pairs = list(zip(self.members, storage, strict=True))
        asked = self.asked(batch_size)
        able = [len(x) if member.can_sample(x, size) else 0 for (member, x), size in zip(pairs, asked, strict=True)]
        split = self.plan(batch_size, able, generator)
        chosen = split.members
        drawn = [
            pairs[i][0].sample(pairs[i][1], size, generator=generator)
            for i, size in zip(chosen, split.sizes, strict=True)
        ]
        self.drew(split.owed)
        index = [found[0] if isinstance(found, tuple) and len(found) == 1 else found for found, _ in drawn]
        rows = [found for found in index if isinstance(found, torch.Tensor)]
        same = len(rows) == len(index) and len({found.shape for found in rows}) == 1
        members = torch.tensor(chosen, dtype=torch.int64, device="cpu")
        return {"index": torch.stack(rows) if same else index, "buffer_ids": members}, {
            "parts": [info for _, info in drawn]
        }

    def can_sample(self, storage: Sequence[BareStorage], batch_size: int) -> bool:
        """Return whether `sample` can draw a batch now: with `sample_from_all` from all members, else from one."""
        if len(storage) != len(self.members):
            return False
        try:
            asked = self.asked(batch_size)
        except OptionError:
            return False
        ready = [member.can_sample(x, n) for member, x, n in zip(self.members, storage, asked, strict=True)]
        return (
            all(ready)
            if self.sample_from_all
            else self.ready([i * len(x) for i, x in zip(ready, storage, strict=True)])
        )

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

    def _shares_now(self, rows: Sequence[int]) -> list[Any]:
        if self._ratio is not None:
            return self._ratio.shares()
        if isinstance(self._p, torch.Tensor):
            return [float(share) for share in self._p]
        if self._p is None:
            return [1 / len(self.members)] * len(self.members)
        total = sum(rows)
        if total == 0:
            msg = "Cannot sample from an empty storage: no member of the ensemble holds rows; add some first"
            raise EmptyBufferError(msg)
        return [count / total for count in rows]

    def subset(self, chosen: list[int]) -> Self:
        """Return an ensemble of some of the samplers, with the same ratio of shares and number of parts."""
        parts: dict[str, Any] = {}
        if self._ratio is None:
            parts["p"] = self._p[chosen] if isinstance(self._p, torch.Tensor) else self._p
            parts["sample_from_all"] = self.sample_from_all
            parts["num_buffer_sampled"] = None if self.sample_from_all else self.num_buffer_sampled
        members, least = [self.members[i] for i in chosen], [self.min_rows[i] for i in chosen]
        some = type(self)(*members, when_empty=self.when_empty, min_rows=least, **parts)
        some._ratio = None if self._ratio is None else self._ratio.subset(chosen)  # noqa: SLF001 (the same class)
        return some

    def state_dict(self) -> dict[str, Any]:
        """Return the distribution; the states of the members belong to their buffers."""
        p = self._p.tolist() if isinstance(self._p, torch.Tensor) else self._p
        state = {"p": p, "sample_from_all": self.sample_from_all, "num_buffer_sampled": self.num_buffer_sampled}
        return state if self._ratio is None else {**state, "ratio": self._ratio.state_dict()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state is of the same distribution; `p` and numbers of `ratio` may differ: they may be set.

        Raises:
            CheckpointError: naming what differs.
        """
        saved = state.get("ratio")
        if (saved is None) != (self._ratio is None):
            how = ("a ratio", "equal parts")
            msg = (
                f"the checkpoint is of an ensemble that mixes by {how[saved is None]}, this one by "
                f"{how[self._ratio is None]}: make it with the same options"
            )
            raise CheckpointError(msg)
        if self._ratio is not None and saved is not None:
            self._ratio.read_state(saved)
            return
        for name in ("sample_from_all", "num_buffer_sampled"):
            if state[name] != getattr(self, name):
                msg = (
                    f"the checkpoint is of an ensemble with {name}={state[name]!r}, this one has "
                    f"{name}={getattr(self, name)!r}: make it with the same options"
                )
                raise CheckpointError(msg)
        p = state["p"]
        if p is None or p == _SAMPLEABLE:
            return
        try:
            _shares(p, len(self.members))
        except (OptionError, KindError) as error:
            msg = f"the checkpoint's mixing weights do not fit this ensemble: {error}"
            raise CheckpointError(msg) from None
        if abs(sum(p) - 1) > _NEARLY:
            msg = f"the checkpoint's mixing weights {p} are no shares of 1: it is damaged"
            raise CheckpointError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, including `p` and the ratio, its step and its carry."""
        self.check_state(state)
        if self._ratio is not None:
            self._ratio.load_state_dict(state["ratio"])
            return
        p = state["p"]
        # not divided by its sum again, which would change the last digits
        self._p = torch.tensor(p, dtype=torch.float64, device="cpu") if isinstance(p, list) else p

    def _show_p(self) -> Any:
        return [round(share, 6) for share in self._p.tolist()] if isinstance(self._p, torch.Tensor) else repr(self._p)


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        msg = f"{name} must be an integer, got {value!r}"
        raise KindError(msg)
    if value.__index__() < 1:
        msg = f"{name} must be at least 1, got {value!r}"
        raise OptionError(msg)
    return int(value.__index__())


def _shares(value: Any, members: int) -> Tensor:
    try:
        given = (
            value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value, dtype=np.float64))
        )
        weights = given.to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f'p must be numbers, None or "sampleable", got {value!r} ({error})'
        raise KindError(msg) from None
    if weights.shape != (members,):
        msg = f"p must hold one number for each of the {members} members, got shape {list(weights.shape)}"
        raise OptionError(msg)
    total = float(weights.sum())
    if bool((weights < 0).any()) or not math.isfinite(total) or total <= 0:
        msg = f"p must be finite numbers of at least 0, not all 0, got {weights.tolist()}"
        raise OptionError(msg)
    return weights / total


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
