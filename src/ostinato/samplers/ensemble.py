"""The distribution by which an ensemble of buffers draws the parts of a batch from its members."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, final, get_args

import numpy as np
import torch

from ostinato.core.group import Group
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, UsageError
from ostinato.samplers.base import Sampler, check_replacement

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.samplers.standalone import BareStorage

__all__ = ["SamplerEnsemble", "WhenEmpty"]

WhenEmpty: TypeAlias = Literal["renormalize", "raise"]
"""How an ensemble handles a member without rows to draw."""
_WHEN_EMPTY = get_args(WhenEmpty)
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

    Args:
        *samplers: at least one.
        p: weights of the members, finite numbers of at least 0, which are divided by their sum; None for equal ones;
            `"sampleable"` for the number of rows in each member. A member of weight 0 is never drawn.
        sample_from_all: one part from every member; excludes `p`.
        num_buffer_sampled: parts of a batch; None is the number of members.
        when_empty: "renormalize" excludes members without rows from a batch, "raise" raises EmptyBufferError for them.
            With `p="sampleable"` they always have the weight 0.
        replacement: must be True; samplers without replacement are given as members.

    Raises:
        KindError: if an argument is not a sampler, or an option of the wrong type.
        OptionError: if an option is out of range.
        UsageError: if `p` is given with `sample_from_all`.

    Example:
        >>> from ostinato import RandomSampler, SamplerEnsemble
        >>> mix = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[3, 1], num_buffer_sampled=4)
        >>> sorted(mix.choose([100, 100], None))
        [0, 0, 0, 1]
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        when_empty: WhenEmpty = "renormalize",
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        super().__init__(samplers, Sampler)
        if when_empty not in _WHEN_EMPTY:
            msg = f'when_empty must be "renormalize" or "raise", got {when_empty!r}'
            raise OptionError(msg)
        self.when_empty: WhenEmpty = when_empty
        self._warned = False
        if sample_from_all and p is not None:
            msg = (
                "Cannot pass both `p` argument and `sample_from_all=True`: the latter takes equal parts from all "
                f"members, got p={p!r}: leave one of them out"
            )
            raise UsageError(msg)
        self.sample_from_all = bool(sample_from_all)
        self.num_buffer_sampled = len(samplers) if num_buffer_sampled is None else self._check_parts(num_buffer_sampled)
        self.p = p

    def __repr__(self) -> str:
        """Show the samplers and the distribution."""
        shares = "sample_from_all=True" if self.sample_from_all else f"p={self._show_p()}"
        members = ", ".join(map(repr, self.members))
        empty = "" if self.when_empty == "renormalize" else f", when_empty={self.when_empty!r}"
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
        if isinstance(value, str) and value != _SAMPLEABLE:
            msg = f"The only dynamic SamplerEnsemble probability is 'sampleable', got p={value!r}: or give numbers"
            raise OptionError(msg)
        self._p = value if value is None or isinstance(value, str) else _shares(value, len(self.members))

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
        shares = self._shares_now(rows)
        lacking = [i for i, share in enumerate(shares) if share > 0 and rows[i] == 0]
        if lacking:
            shares = self._without(lacking, shares)
        elif self.sample_from_all:
            return list(range(len(self.members)))
        return _systematic(shares, self.num_buffer_sampled, generator)

    def sample(
        self, storage: Sequence[BareStorage], batch_size: int, *, generator: torch.Generator | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw rows of bare storages, without a `ReplayBufferEnsemble`; see `Sampler.sample`.

        Args:
            storage: the members' storages, such as a `StorageEnsemble`.
            batch_size: rows to draw, a multiple of `num_buffer_sampled`.
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
        size, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest or size < 1:
            msg = (
                "The batch size must be divisible by num_buffer_sampled, and not 0: got "
                f"batch_size={batch_size} and num_buffer_sampled={self.num_buffer_sampled}"
            )
            raise OptionError(msg)
        pairs = list(zip(self.members, storage, strict=True))
        chosen = self.choose([len(x) if member.can_sample(x, size) else 0 for member, x in pairs], generator)
        drawn = [pairs[i][0].sample(pairs[i][1], size, generator=generator) for i in chosen]
        index = [found[0] if isinstance(found, tuple) and len(found) == 1 else found for found, _ in drawn]
        rows = [found for found in index if isinstance(found, torch.Tensor)]
        same = len(rows) == len(index) and len({found.shape for found in rows}) == 1
        members = torch.tensor(chosen, dtype=torch.int64, device="cpu")
        return {"index": torch.stack(rows) if same else index, "buffer_ids": members}, {
            "parts": [info for _, info in drawn]
        }

    def can_sample(self, storage: Sequence[BareStorage], batch_size: int) -> bool:
        """Return whether `sample` can draw a batch now: with `sample_from_all` from all members, else from one."""
        size, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest or size < 1 or len(storage) != len(self.members):
            return False
        ready = [member.can_sample(x, size) for member, x in zip(self.members, storage, strict=True)]
        if self.sample_from_all or self.when_empty == "raise":
            return all(ready)
        if isinstance(self._p, torch.Tensor):
            return any(able and share > 0 for able, share in zip(ready, self._p.tolist(), strict=True))
        return any(ready)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the members' states to the directories `0`, `1`, ... of a directory; see `Sampler.dumps`."""
        for number, member in enumerate(self.members):
            member.dumps(Path(path) / str(number))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore what `dumps` saved, member by member; the distribution is not part of it."""
        for number, member in enumerate(self.members):
            member.loads(Path(path) / str(number))

    def _without(self, lacking: list[int], shares: list[float]) -> list[float]:
        """Return the shares of a batch without some members, of sum 1.

        Raises:
            EmptyBufferError: if there are no other members, or with `when_empty="raise"`.
        """
        left = [0.0 if i in lacking else share for i, share in enumerate(shares)]
        total = sum(left)
        if self.when_empty == "raise" or total <= 0:
            others = "" if total > 0 else ", and no other member has p > 0"
            msg = f"Cannot sample from an empty storage: members {lacking} of the ensemble have no rows to draw{others}"
            msg_0 = f"{msg}; add some first"
            raise EmptyBufferError(msg_0)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"members {lacking} of the ensemble have no rows to draw: batches come from the other members, in the "
                f"ratio {[round(share / total, 6) for share in left]}, until these have some. Set "
                'when_empty="raise" to raise instead. This warning is shown once',
                UserWarning,
                stacklevel=2,
            )
        return [share / total for share in left]

    def _shares_now(self, rows: Sequence[int]) -> list[float]:
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
        return type(self)(
            *(self.members[i] for i in chosen),
            p=self._p[chosen] if isinstance(self._p, torch.Tensor) else self._p,
            sample_from_all=self.sample_from_all,
            num_buffer_sampled=None if self.sample_from_all else self.num_buffer_sampled,
            when_empty=self.when_empty,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the distribution; the states of the members belong to their buffers."""
        p = self._p.tolist() if isinstance(self._p, torch.Tensor) else self._p
        return {"p": p, "sample_from_all": self.sample_from_all, "num_buffer_sampled": self.num_buffer_sampled}

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state is of the same distribution; `p` may differ, since it may be set at any time.

        Raises:
            CheckpointError: naming what differs.
        """
        for name in ("sample_from_all", "num_buffer_sampled"):
            if state[name] != getattr(self, name):
                msg = (
                    f"the checkpoint is of an ensemble with {name}={state[name]!r}, this one has "
                    f"{name}={getattr(self, name)!r}: make it with the same options"
                )
                raise CheckpointError(msg)
        try:
            if state["p"] is not None and state["p"] != _SAMPLEABLE:
                shares = _shares(state["p"], len(self.members))
                if not torch.allclose(
                    shares, torch.as_tensor(state["p"], dtype=torch.float64, device="cpu"), rtol=0, atol=1e-6
                ):
                    msg = f"the checkpoint's mixing weights {state['p']} are no shares of 1: it is damaged"
                    raise CheckpointError(msg)
        except (OptionError, KindError) as error:
            msg = f"the checkpoint's mixing weights do not fit this ensemble: {error}"
            raise CheckpointError(msg) from None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, including `p`."""
        self.check_state(state)
        p = state["p"]
        # not divided by its sum again, which would change the last digits
        self._p = torch.tensor(p, dtype=torch.float64, device="cpu") if isinstance(p, list) else p

    def _check_parts(self, value: Any) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            msg = f"num_buffer_sampled must be an integer or None, got {value!r}"
            raise KindError(msg)
        parts = int(value.__index__())
        if parts < 1:
            msg = f"num_buffer_sampled must be at least 1, got {parts}"
            raise OptionError(msg)
        if self.sample_from_all and parts != len(self.members):
            msg = (
                f"sample_from_all=True takes one part from each of the {len(self.members)} members, got "
                f"num_buffer_sampled={parts}: leave it out"
            )
            raise OptionError(msg)
        return parts

    def _show_p(self) -> Any:
        return [round(share, 6) for share in self._p.tolist()] if isinstance(self._p, torch.Tensor) else repr(self._p)


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
