"""NStep: transitions over n steps, computed from single steps when they are drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.core.episodes.continuity import looks_next
from ostinato.core.episodes.tracker import as_path
from ostinato.core.kinds import show_path
from ostinato.core.options import check_integer, check_real
from ostinato.core.records import Column, Plan, Request
from ostinato.errors import OptionError, SchemaError
from ostinato.units.base import SampleUnit, episodes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import View
    from ostinato.core.rows import Path, Schema

_ADDABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_END = re.compile(r"(is_)?(d|dones?|terminat(ed|ions?)|terminals?|truncat(ed|ions?)|timeouts?)")
"""Names of flags that end episodes."""


@final
class NStep(SampleUnit):
    """Turns each row drawn into the transition over the next `n` steps of its episode.

    Let `k` be the number of steps: `n`, or fewer if the episode has fewer rows from the row on. The reward is
    `sum_{i<k} gamma^i r_{t+i}` (Sutton 1988; Hessel et al. 2018, section 3). The fields after the step (`next`
    observation, `done`, `terminated`, `truncated`) are those of step `t + k - 1`. A return stops at a termination. It
    also stops at a truncation and at the newest row of an episode that continues, and the target bootstraps from the
    true last observation: `reward + gamma * (1 - terminated) * value(next)`, where the field `gamma` of the batch is
    `gamma^k`, float32 `[B]`. The batch also has the field `steps_to_next_obs`, `k`, int64 `[B]`. `n` and `gamma` can be
    set at any time, and apply from the next draw on.

    Args:
        n: maximum number of steps, at least 1.
        gamma: discount of one step, in [0, 1].
        reward_key: field of the reward, floating; None: `("next", "reward")` if rows have it, else `reward`.
        next_keys: fields after the step; None: all fields under `next` except the reward. If there are none, the fields
            whose names, or those of their dicts, begin with `next_`, and the flags: those that end episodes, and those
            called `done`, `terminated`, `truncated` or the like (`dones`, `terminals`, `timeouts`, `d`). `()` is none,
            and a flag that a list leaves out stays that of the first step. `repr` lists the fields once rows are known.
        done_key: field that ends episodes; None: the buffer's `episodes`, or the usual flags.

    Raises:
        OptionError: for numbers out of range.
        SchemaError: from the first write, or when a buffer with rows is made: without `next_keys`, if rows hold more
            than rewards and flags, and no field but flags comes after the step, or one that by its name does
            (`obs_next`) would stay that of a single step. Also if rewards are not floats.
        KeyMissingError: from the same calls, if there is no such reward, or no field of `next_keys`.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, NStep, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=NStep(3, 0.5), batch_size=1)
        >>> done = torch.tensor([False, False, False, True])
        >>> place = torch.arange(4.0)
        >>> _ = rb.extend({"obs": place, "next_obs": place + 1, "reward": torch.ones(4), "done": done})
        >>> batch = rb.sample()
        >>> bool(batch["next_obs"] == batch["obs"] + batch["steps_to_next_obs"])
        True
    """

    options = ("reward_key", "next_keys")
    rank = 1

    def __init__(
        self,
        n: int,
        gamma: float,
        *,
        reward_key: Key | None = None,
        next_keys: Sequence[Key] | None = None,
        done_key: Key | None = None,
    ) -> None:
        self.n = n
        self.gamma = gamma
        self.reward_key = reward_key
        self.next_keys = next_keys
        self.episodes = episodes_of(done_key)
        self._reward = None if reward_key is None else as_path(reward_key)
        self._next = None if next_keys is None else tuple(as_path(key) for key in next_keys)
        self._known: tuple[Any, Tensor] = (None, torch.empty(0, dtype=torch.float32, device="cpu"))
        self._roles = _Roles(None, (), -1, (), None)

    def __repr__(self) -> str:
        """Options, and the fields after the step: those given, or those of the rows that it was last used with."""
        known = self._next if self._next is not None else self._roles.moved
        moves = "" if known is None else f", moves=[{', '.join(map(show_path, known))}]"
        return f"{self.shown_options()[:-1]}{moves})"

    def shown_options(self) -> str:
        """Class and options, whatever rows it is used with."""
        return f"NStep(n={self._n}, gamma={self._gamma:g})"

    @property
    def n(self) -> int:
        """Maximum number of steps of a transition."""
        return self._n

    @n.setter
    def n(self, value: int) -> None:
        self._n = check_integer("n", value, 1, OptionError)

    @property
    def gamma(self) -> float:
        """Discount of one step."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma = check_real("gamma", value, 0.0, 1.0)

    @property
    def joins(self) -> bool:
        """Whether a window has several rows."""
        return self.span > 1

    @property
    def span(self) -> int:
        """Rows of a window."""
        return self._n

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Read the rewards of all steps, and the other fields after the last step."""
        _, _, reward, after, moved = self._roles_of(plan, view.ends)
        exact = plan.schema.leaves[reward].dtype is torch.float64
        powers = self.powers(torch.float64 if exact else torch.float32)
        rows, weights, steps, discounts, last = view.require_episodes().steps(plan.records, powers)
        columns = dict(plan.changed)
        for position in after:
            columns[position] = Column(Request(position, last))
        columns[reward] = Column(Request(reward, rows.view(-1)), (powers.shape[0] - 1,), weights)
        fields = {**plan.fields, "steps_to_next_obs": steps, "gamma": discounts}
        objects = [leaf.path for leaf in plan.schema.objects if leaf.path in (moved or ())]
        elsewhere = {**plan.elsewhere, **dict.fromkeys(objects, last)} if plan.schema.objects else {}
        return plan._replace(changed=columns, fields=fields, elsewhere=elsewhere)

    def check_schema(self, schema: Schema, ends: tuple[Path, ...] = ()) -> None:
        """Check that rows have a reward, and fields after the step."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        self._roles_of(Plan(schema, none, none), ends)

    def powers(self, dtype: torch.dtype) -> Tensor:
        """Return `gamma^0 .. gamma^n` as they are now, `[n + 1]`, on the CPU. Do not write to it."""
        key = (self._n, self._gamma, dtype)  # read once: another thread may set them
        known, powers = self._known
        if known != key:
            exponents = torch.arange(key[0] + 1, device="cpu", dtype=torch.float64)
            powers = torch.pow(key[1], exponents).to(dtype)
            self._known = (key, powers)
        return powers

    def _roles_of(self, plan: Plan, ends: tuple[Path, ...]) -> _Roles:
        """Return the positions of the reward and of the fields after the step; computed once for each schema."""
        if self._roles.schema is plan.schema and self._roles.ends == ends:
            return self._roles
        objects = [leaf.path for leaf in plan.schema.objects]
        paths = [*(leaf.path for leaf in plan.schema.leaves), *objects]
        path: Path = self._reward or (("next", "reward") if ("next", "reward") in paths else ("reward",))
        reward = plan.require(path, "the reward of a step")
        plan.require_absent("steps_to_next_obs", "gamma")
        dtype = plan.schema.leaves[reward].dtype
        if dtype not in _ADDABLE:
            msg = (
                f"{show_path(path)} must be float16, bfloat16, float32 or float64, to sum discounted rewards, got "
                f"{dtype}: convert it before writing"
            )
            raise SchemaError(msg)
        moved: tuple[Path, ...] | None = self._next
        if moved is None:
            moved = tuple(other for other in paths if other != path and (other in ends or _follows(other, paths)))
            _check_moved(moved, [other for other in paths if other not in {path, *ends}])
        after = tuple(plan.require(other, "a field after the step") for other in moved if other not in objects)
        self._roles = _Roles(plan.schema, ends, reward, after, moved)
        return self._roles


class _Roles(NamedTuple):
    """What the fields of a schema are: positions among its leaves."""

    schema: Schema | None
    ends: tuple[Path, ...]
    reward: int
    after: tuple[int, ...]
    moved: tuple[Path, ...] | None
    """The fields after the step, of tensors and of Python objects; None before rows are known."""


def _follows(path: Path, paths: list[Path]) -> bool:
    """Return whether a field is one after the step, by its name."""
    if any(other[:1] == ("next",) for other in paths):
        return path[:1] == ("next",)
    names = [name for name in path if isinstance(name, str)]
    return any(name.startswith("next_") for name in names) or _END.fullmatch(names[-1] if names else "") is not None


def _check_moved(moved: tuple[Path, ...], paths: list[Path]) -> None:
    """Check that the fields after the step, found by their names, are all that rows have.

    Args:
        moved: the fields found.
        paths: all fields except the reward and those that end episodes.

    Raises:
        SchemaError: if a next observation would stay that of a single step, or is not found.
    """
    states = [path for path in moved if path in paths and not _is_flag(path)]
    left = [path for path in paths if path not in moved and not _is_flag(path)]
    missed = [path for path in left if looks_next(path, paths)]
    if not left or (states and not missed):
        return
    found = f"it finds {', '.join(map(show_path, states))}"
    if not states:
        found = "no field is under 'next' or begins with 'next_'"
    given = ", ".join(repr(path[0] if len(path) == 1 else path) for path in [*moved, *missed])
    if missed:
        named = ", ".join(map(show_path, missed))
        advice = f"{named} looks like one: name all fields after the step, next_keys=[{given}]"
    else:
        known = ", ".join(map(show_path, left))
        advice = (
            f"rows have {known}: name it beside the flags, next_keys=[{given}], or give these alone if rows have none"
        )
    msg = f"NStep takes the next observation from the last of n steps, and {found}; {advice}"
    raise SchemaError(msg)


def _is_flag(path: Path) -> bool:
    """Whether a field is an end flag, or a reward, of the step or of the next one."""
    last = path[-1] if path else None
    name = last.removeprefix("next_") if isinstance(last, str) else ""
    return name == "reward" or _END.fullmatch(name) is not None
