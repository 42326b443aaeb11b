"""Priorities: their options and checks, several of them as one, and sum trees: one in torch, and the native one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch.nn.functional import pad

from ostinato._backend import backend
from ostinato.core.options import check_choice, check_integer
from ostinato.core.rank_order import REDUCTIONS
from ostinato.core.records import Run, check_slots, require_values
from ostinato.errors import CapacityError, KindError, OptionError, PriorityError, PriorityShapeError, warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato._native import SumTree
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Schema
    from ostinato.core.shared_ring import SharedRing

MAX_VALUE = 2.0**960
"""Largest value of a row: the sum of 2**36 of them is still finite."""
WEIGHT_DTYPES = frozenset({torch.float32, torch.float64})
"""Dtypes of weights that the native extension writes."""
_FAN = 8
_DEVICE_FAN = 256  # of lazy trees: each level costs about twenty operations, whose start is what takes time on a GPU
_CPU = torch.device("cpu")
_MAX_CAPACITY = 2**36
_SMALL = 2**16
"""Trees up to this size have a leaf for every slot of the storage, whatever `max_capacity` is."""
_MAX_EXPONENT = 2.0
"""Exponents of papers are at most 1, and those of TorchRL's examples 1.1; beyond, a few rows are all that is drawn."""
_ROUNDING = 1e-6
_SHOWN = 8


def reduce_items(items: Tensor, reduction: str) -> Tensor:
    """Reduce the values of each item to one priority.

    Args:
        items: `[n, *shape]`, any real dtype.
        reduction: "max", "min", "mean" or "median"; of an even number the median is the lower one.

    Returns:
        float64 `[n]`.

    Raises:
        PriorityError: if items have no value.
    """
    flat = items.reshape(items.shape[0], -1).to(torch.float64)
    if flat.shape[1] == 0:
        msg = f"priorities of {items.shape[0]} items have the shape {list(items.shape)}: no number per item"
        raise PriorityError(msg)
    return flat[:, 0] if flat.shape[1] == 1 else REDUCTIONS[reduction](flat)


def steps_of_rows(schema: Schema | None) -> int:
    """Return the length of rows that are trajectories `[T, ...]`, where all fields have this dimension; else 1."""
    shapes = () if schema is None else [leaf.shape for leaf in schema.leaves]
    lengths = {shape[:1] for shape in shapes}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else 1


def check_one_each(given: tuple[int, ...], batch: tuple[int, ...], steps: int | None) -> None:
    """Check that priorities are not those of all pairs of rows: `[B, B]` comes from `[B] - [B, 1]`, and is never meant.

    Args:
        given: shape of the priorities.
        batch: shape of the index of the rows.
        steps: steps of each row, where rows are trajectories; 1 for single rows, None for windows of any length.

    Raises:
        PriorityShapeError: if they are.
    """
    if batch and batch[-1] > 1 and given == (*batch, batch[-1]) and steps is not None and steps != batch[-1]:
        msg = (
            f"the priorities of an index of shape {list(batch)} have the shape {list(batch)}, or further dimensions of "
            f"values of one row, got {list(given)}: a number for each pair of rows. Errors of shape [B] less "
            "predictions of shape [B, 1] broadcast to [B, B]: use .squeeze(-1) on the latter. Where there are as many "
            "values for each row as rows, reduce them first, such as .amax(-1)"
        )
        raise PriorityShapeError(msg)


def read_priorities(priority: Any, batch: tuple[int, ...], steps: int | None) -> Tensor:
    """Return priorities of rows that are indexed in the shape `batch`.

    Args:
        priority: a number or tensor or array: one for all rows, one for each, or `[*batch, *shape]`.
        batch: shape of the index.
        steps: see `check_one_each`.

    Returns:
        Any real dtype, on the device they came on: 0-dim for one priority of all rows, else `[n]` or `[n, *shape]`.

    Raises:
        KindError: if they are not real numbers, or have no values.
        SchemaError: for another shape; a `RuntimeError` as well.
    """
    try:
        values = (
            priority
            if isinstance(priority, torch.Tensor)
            else torch.as_tensor(np.asarray(priority, dtype=np.float64), device="cpu")
        )
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"priorities are real numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    require_real(values)
    require_values(values, "priorities")
    values, shape, n = values.detach(), tuple(values.shape), math.prod(batch)
    if values.numel() == 1:
        return values.reshape(())
    check_one_each(shape, batch, steps)
    if shape[: len(batch)] == batch:
        return values.reshape(n, *shape[len(batch) :])
    if values.numel() == n:
        return values.reshape(-1)
    msg = (
        "priority should be a number or an iterable of the same length as index, or have its shape "
        f"{list(batch)} (further dimensions are reduced per row), got shape {list(shape)}"
    )
    raise PriorityShapeError(msg)


def require_real(values: Tensor) -> None:
    """Check that priorities are real numbers.

    Raises:
        KindError: if they are not.
    """
    if values.dtype is torch.bool or values.is_complex():
        msg = f"priorities must be real numbers, got {values.dtype}: pass absolute errors, such as td_error.abs()"
        raise KindError(msg)


def read_values(priority: Any, shape: tuple[int, ...], reduce: Callable[[Tensor], Tensor], steps: int | None) -> Tensor:
    """Return one priority for each row of an index of this shape, float64 `[n]`, on the device they came on.

    Args:
        priority: see `read_priorities`.
        shape: of the index.
        reduce: reduces several priorities of a row, `[n, *shape]`, to one.
        steps: see `check_one_each`.

    Raises:
        KindError, PriorityShapeError: see `read_priorities`.
    """
    values = read_priorities(priority, shape, steps)
    values = reduce(values) if values.ndim > 1 else values.to(torch.float64)
    return values.expand(math.prod(shape)).contiguous()


def check_exponent(name: str, value: Any) -> float:
    """Return `alpha` or `beta` as a float; numbers that rounding took just below 0 become 0.

    Raises:
        OptionError: if it is not a number in [0, 2].

    Warns: `UserWarning`, above 1.
    """
    rounded = isinstance(value, (float, np.floating)) and -_ROUNDING <= value < 0
    number = check_number(name, 0.0 if rounded else value)
    if number > _MAX_EXPONENT:
        msg = (
            f"{name} must be in [0, {_MAX_EXPONENT:g}], where 0 is none and 1 the full effect, got {name}={value!r}: "
            "give a number such as 0.5"
        )
        raise OptionError(msg)
    if number > 1 + _ROUNDING:
        msg = (
            f"{name}={value!r} is above 1, where draws exaggerate priorities and weights overcorrect: use a number in "
            "[0, 1], as in prioritized replay (Schaul et al., 2016)"
        )
        warn_caller(msg, UserWarning)
    return number


def check_number(name: str, value: Any) -> float:
    """Return an exponent or offset as a float.

    Raises:
        OptionError: if it is not a finite number of at least 0.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, (str, bytes)) or not 0.0 <= number < float("inf"):
        word = "than" if name == "alpha" else "to"  # TorchRL's words
        msg = f"{name} must be greater or equal {word} 0, got {name}={value!r}: give a finite number of at least 0"
        raise OptionError(msg)
    return number


def raise_invalid(priorities: Tensor) -> None:
    """Raise for priorities of which some are negative or not finite.

    Raises:
        PriorityError: naming them and their positions.
    """
    bad = (~((priorities >= 0) & (priorities < float("inf")))).nonzero().flatten()
    values = [f"{value:g}" for value in priorities[bad[:_SHOWN]].tolist()]
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    msg = (
        f"priorities must be finite and at least 0, got {', '.join(values)} at the positions "
        f"{bad[:_SHOWN].tolist()}{more} of {len(priorities)}: pass absolute errors, such as td_error.abs(); nothing "
        "was changed"
    )
    raise PriorityError(msg)


def check_reduction(reduction: str) -> str:
    """Return how several priorities of an item become one.

    Raises:
        OptionError: for another name.
    """
    return check_choice("reduction", reduction, [name for name in REDUCTIONS if name != "sum"])


def check_capacity(value: Any) -> int:
    """Return the most rows of a sampler with priorities.

    Raises:
        KindError: if it is no integer.
        CapacityError: if it is out of range.
    """
    number = check_integer("max_capacity", value)
    if not 1 <= number <= _MAX_CAPACITY:
        msg = (
            f"max_capacity must be in [1, 2**36] (rows), got {number}: priorities take memory for every slot, so give "
            "the storage a max_size"
        )
        raise CapacityError(msg)
    return number


def values_of(priorities: Tensor, eps: float, alpha: float) -> Tensor:
    """Return `(p + eps) ** alpha` in fresh memory; 0 where `p + eps` is 0, also for `alpha = 0`."""
    if alpha == 0:
        return ((priorities + eps) > 0).to(torch.float64)
    if not priorities.is_cpu:
        return (priorities + eps).pow_(alpha)
    values = priorities.numpy() + eps  # numpy starts an operation in a third of torch's time
    return torch.from_numpy(np.power(values, alpha, out=values))


def fits(priority: float, eps: float, alpha: float) -> bool:
    """Return whether the value of a priority is at most `MAX_VALUE`."""
    try:
        return bool((priority + eps) ** alpha <= MAX_VALUE)
    except OverflowError:
        return False


def last_of_equal(slots: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Return `values` with each replaced by that of the last equal slot, so that the order of writing does not matter.

    No host sync. Where `keep` is False, a value counts only if no equal slot has one that counts.
    """
    ordered, order = torch.sort(slots * 2 + keep.to(slots.dtype), stable=True)
    last = torch.searchsorted(ordered, slots * 2 + 1, right=True) - 1
    return values[order[last]]


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-dim float64 tensor on a device, without a host sync."""
    if isinstance(number, float):
        return torch.full((), number, dtype=torch.float64, device=device)
    return number.to(device, torch.float64)


def is_column(x: Any, rows: int) -> bool:
    """Return whether `x` is a float64 tensor `[rows]` of finite numbers of at least 0."""
    matches = isinstance(x, torch.Tensor) and x.dtype is torch.float64 and tuple(x.shape) == (rows,)
    return matches and bool(((x >= 0) & (x < float("inf"))).all())


# -- the priorities of rows ------------------------------------------------------------------------------------------


def largest_valid(priorities: Tensor, eps: float, alpha: float) -> float:
    """Return the largest of some priorities on the CPU, float64 `[n]`, `n >= 1`.

    Raises:
        PriorityError: if some are negative, not finite, or so large that their values would not be finite; names
            their positions.
    """
    values = priorities.numpy()
    low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not (low >= 0.0 and high < float("inf")):
        raise_invalid(priorities)
    if not fits(high, eps, alpha):
        msg = (
            f"priorities must keep (p + eps) ** alpha at most 2**960, got {high:g} with alpha={alpha:g}: "
            "scale them down"
        )
        raise PriorityError(msg)
    return high


def most_slots(max_capacity: int) -> int:
    """Return the slots up to which a tree has a leaf for each, whatever rows it is for."""
    return max(2 * max_capacity, _SMALL)


@final
class PriorityColumn:
    """Priorities of the rows of a buffer, as they were given, and a tree of their values `(p + eps) ** alpha`.

    Hidden rows keep their priority and have the value 0. The default priority of new rows is the largest one given, or
    with `within` the largest one of the rows present.

    Args:
        max_capacity: of the sampler.
        alpha: exponent of the values.
        eps: added to every priority.
        within: whether the default priority is that of the rows present.
    """

    def __init__(self, max_capacity: int, alpha: float, eps: float, *, within: bool) -> None:
        self.max_capacity, self.alpha, self.eps, self.within = max_capacity, alpha, eps, within
        self.ring: SharedRing | None = None
        """The ring of a buffer that processes share, whose memory priorities and values are in."""
        self.raw = torch.empty(0, dtype=torch.float64, device="cpu")
        """Priorities, float64 `[slots]`."""
        self.tree = make_tree(1, _CPU)
        """Values of the slots."""
        self.hidden: Tensor | None = None
        """bool `[slots]`, True for rows that may not be drawn; None until a row is hidden."""
        self.count = self.slots = 0
        """Rows with a priority in a private buffer; slots of the buffer that the tree was made for, 0 at first."""
        self.largest: float | Tensor = 0.0
        self.invalid: Tensor | None = None
        """bool on a device: whether an update there was invalid."""
        self._outdated = False

    def shared(self, ring: Any, alpha: float) -> PriorityColumn:
        """Return a column in the memory of a ring that processes share, with these priorities."""
        (priorities, values), largest = self.contents(), float(self.find_largest())
        if self.alpha != alpha:
            values = values_of(priorities, self.eps, alpha)
        made = PriorityColumn(self.max_capacity, alpha, self.eps, within=self.within)
        made.ring, made.raw, made.tree = ring, ring.priorities, NativeTree(ring.tree)
        made.slots = made.tree.capacity
        if priorities.shape[0]:
            made.raw[: priorities.shape[0]] = priorities
            made.tree.set(torch.arange(priorities.shape[0], device="cpu"), values)
            ring.max_priority = largest
        return made

    @property
    def rows(self) -> int:
        """Rows with a priority: the slots `[0, rows)`."""
        return self.count if self.ring is None else self.ring.rows

    @property
    def nbytes(self) -> int:
        """Bytes of priorities, tree and what is hidden."""
        return sum(part.nbytes for part in (self.raw, self.hidden, self.tree) if part is not None)

    def contents(self, *, shown: bool = False) -> tuple[Tensor, Tensor]:
        """Return priorities (a view) and values (a copy) of the rows, float64 `[rows]` each.

        Args:
            shown: give hidden rows the values that they have when they may be drawn.
        """
        rows = self.rows
        raw = self.raw[:rows]
        values = self.tree.leaves(rows)
        if shown and self.hidden is not None and rows:
            values = torch.where(self.hidden[:rows].to(values.device), values_of(raw, self.eps, self.alpha), values)
        return raw, values

    def allocate(self, priorities: Tensor, values: Tensor, slots: int, device: torch.device) -> PriorityTree:
        """Allocate memory for a buffer of so many slots, with copies of the priorities and values of the first rows."""
        capacity = slots if slots <= most_slots(self.max_capacity) else self.max_capacity
        with torch.inference_mode(mode=False):  # updates come in any mode
            raw = torch.empty(capacity, dtype=torch.float64, device=device)
            if self.hidden is not None:
                hidden = self.hidden[:capacity].to(device)
                self.hidden = pad(hidden, (0, capacity - hidden.shape[0]))
        native = backend.native
        if native is not None and raw.is_cpu:
            native.advise_huge_pages(raw.data_ptr(), raw.nbytes)  # random rows then miss the TLB less often
        self.count = min(priorities.shape[0], capacity)
        raw.zero_()[: self.count] = priorities[:capacity]
        self.raw, self.tree, self.slots = raw, make_tree(capacity, raw.device), slots
        self.tree.load(values[:capacity].to(device))
        return self.tree

    def cut(self, rows: int) -> None:
        """Drop the priorities of all slots from `rows` on."""
        priorities, values = self.contents()
        self.allocate(priorities[:rows], values[:rows], rows, self.raw.device)
        self._outdated = True

    def set_alpha(self, alpha: float) -> None:
        """Compute all values from the priorities, for another `alpha`.

        Raises:
            PriorityError: on the CPU, if a value would be too large; nothing is changed.
        """
        raw = self.raw[: self.rows]
        if raw.is_cpu and raw.shape[0]:
            largest_valid(raw, self.eps, alpha)
        values = values_of(raw, self.eps, alpha).clamp_(max=MAX_VALUE)
        self.tree.load(values if self.hidden is None else values.masked_fill_(self.hidden[: raw.shape[0]], 0.0))
        self.alpha = alpha

    # -- the default priority ------------------------------------------------------------------------------------------

    def default(self, device: torch.device) -> float | Tensor:
        """Return the priority of the next new row, without a host sync: a 0-dim tensor on other devices than the CPU.

        It is the largest one, or 1 if there is none above 0.
        """
        if device.type == "cpu":
            return float(self.find_largest()) or 1.0
        value = on_device(self.find_largest(), device)
        return torch.where(value > 0, value, 1.0)

    def find_largest(self) -> float | Tensor:
        """Return the largest priority, 0 for none."""
        if self.ring is not None:
            return self.ring.max_priority
        if self.within and (self._outdated or not self.raw.is_cpu):
            present = self.raw[: self.count]
            largest = present.amax() if present.numel() else 0.0
            self.largest = float(largest) if present.is_cpu else largest
            self._outdated = False
        return self.largest

    def track_largest(self, given: float, before: float, after: float | Tensor) -> None:
        """Track the largest priority.

        Args:
            given: largest priority given, 0 for none.
            before: largest priority that the rows changed had before; only used with `within`.
            after: largest priority that these rows have now; as `before`.
        """
        if not self.within:
            if given <= 0:  # nothing to compare: `largest` may be on a device
                return
            if self.ring is None:
                self.largest = max(self.largest, given)
            else:
                self.ring.max_priority = max(self.ring.max_priority, given)
        elif isinstance(after, float):  # on devices it is computed when it is needed
            if after >= self.largest:
                self.largest, self._outdated = after, False
            elif before >= self.largest:
                self._outdated = True  # a row with the largest priority was changed

    # -- writing -------------------------------------------------------------------------------------------------------

    def set(self, slots: Tensor, priorities: Tensor, given: float) -> None:
        """Set valid priorities on the CPU, of which `given` is the largest that a caller gave, 0 for none.

        Raises:
            SlotError: if a slot is beyond the buffer; nothing is changed.
        """
        before = self._largest_at(slots) if self.within else 0.0
        self._set_values(slots, priorities)  # checks the slots first
        # numpy writes in order: of equal slots the last one wins; -0.0 becomes 0.0
        self.raw.numpy()[slots.numpy()] = priorities.numpy() + 0.0
        self.track_largest(given, before, self._largest_at(slots) if self.within else 0.0)

    def set_on_device(self, slots: Tensor, given: Tensor, keep: Tensor | None, rows: int) -> None:
        """Set priorities without a host sync: invalid ones have no effect, and are noted in `invalid`."""
        valid = (given >= 0) & ((given + self.eps).pow(self.alpha) <= MAX_VALUE)
        valid &= (slots >= 0) & (slots < rows)
        keep = torch.ones_like(valid) if keep is None else keep
        invalid = (keep & ~valid).any()
        self.invalid = invalid if self.invalid is None else self.invalid | invalid
        slots, keep = slots.clamp(0, max(rows - 1, 0)), keep & valid
        priorities = last_of_equal(slots, torch.where(keep, given, self.raw[slots]), keep)
        self.raw[slots] = priorities + 0.0
        self._set_values(slots, priorities)
        if not self.within:
            high = torch.where(keep, given, 0.0).amax()
            self.largest = torch.maximum(on_device(self.largest, high.device), high)

    def fill(self, placement: Placement, priority: float | Tensor) -> None:
        """Give rows one priority above 0, and show them; the sampler hides those that may not be drawn."""
        raw, hidden = _quick(self.raw), None if self.hidden is None else _quick(self.hidden)
        value, replaced, parts = (priority + self.eps) ** self.alpha, 0.0, list[Any]()
        if isinstance(placement, Run):
            parts += [slice(first, first + rows) for first, _, rows in placement.parts()]
            self.tree.set_run(placement.start, placement.rows, value)
        else:
            slots = placement.slots_written(self.raw.device)
            parts.append(_quick(slots))
            self.tree.set(slots, torch.empty_like(slots, dtype=torch.float64).fill_(value))
        for part in parts:
            if self.within:
                replaced = max(replaced, self._largest_at(part))
            raw[part] = priority
            if hidden is not None:
                hidden[part] = False
        self.track_largest(0.0, replaced, priority)

    def limit(self, slots: Tensor, hide: Tensor) -> None:
        """Hide rows where `hide` is True, bool `[n]`: their values are 0. Show the others, with those of priorities."""
        tree = self.tree
        if self.hidden is None:
            if not bool(hide.any()):
                return
            with torch.inference_mode(mode=False):
                self.hidden = torch.zeros(tree.capacity, dtype=torch.bool, device=tree.device)
        hidden, at, flags = _quick(self.hidden), _quick(slots), _quick(hide)
        changed = hidden[at] != flags
        at = at[changed]
        if at.shape[0]:
            hidden[at] = flags[changed]
            slots = torch.as_tensor(at, dtype=torch.int64, device=slots.device)
            self._set_values(slots, self.raw[slots])

    def _set_values(self, slots: Tensor, priorities: Tensor) -> None:
        values = values_of(priorities, self.eps, self.alpha)
        self.tree.set(slots, values if self.hidden is None else values.masked_fill_(self.hidden[slots], 0.0))

    def _largest_at(self, slots: Any) -> float:
        """Return the largest priority of some rows on the CPU; else 0."""
        priorities = self.raw[slots]
        return float(priorities.max()) if priorities.numel() and priorities.is_cpu else 0.0


def _quick(values: Tensor) -> Any:
    """Return an array on the CPU, else the tensor: numpy takes less time for few rows, and keeps the GIL.

    Another thread would wake up only to wait for the lock.
    """
    return values.numpy() if values.is_cpu else values


# -- sum trees --------------------------------------------------------------------------------------------------------


def make_tree(capacity: int, device: torch.device) -> PriorityTree:
    """Return a tree of zeros: the native implementation on the CPU, where it is available, else the one in torch.

    Args:
        capacity: number of slots, at least 1.
        device: device of slots and values.
    """
    if device != _CPU:
        return PriorityTree(capacity, device, lazy=True)
    native = backend.native
    return PriorityTree(capacity, device) if native is None else NativeTree(native.SumTree(capacity))


class PriorityTree:
    """Values of the slots `[0, capacity)`, zero at first; draws slot `i` with probability `value[i] / total`.

    A sum tree in float64 with eight children per node, 256 in a lazy one. A parent is computed from its children in a
    fixed order, never incremented, so sums do not drift, and equal leaves give equal totals to the last bit. The
    parents of a `lazy` tree are computed before they are read, all of them in a few operations: on a GPU it is the
    start of an operation that takes time. This class works on any device without a host sync: shapes depend on sizes
    known to the host alone. On the CPU `NativeTree` gives the same results to the last bit.

    Not thread-safe: the buffer's lock orders writes and draws. Dtypes, shapes and devices are those of the arguments
    named below; the caller sees to that, and on other devices than the CPU to slots and values as well.

    Examples:
        >>> import torch
        >>> from ostinato.samplers.priorities import make_tree
        >>> tree = make_tree(10, torch.device("cpu"))
        >>> tree.set(torch.tensor([2, 7]), torch.tensor([1.0, 3.0], dtype=torch.float64))
        >>> tree.draw(torch.tensor([0.0, 0.2, 0.3, 1.0], dtype=torch.float64))[0].tolist()
        [2, 2, 7, 7]
    """

    native: SumTree | None = None
    """The native tree; None in the implementation in torch."""

    def __init__(self, capacity: int, device: torch.device, *, lazy: bool = False) -> None:
        self.capacity, self._lazy = capacity, lazy
        self._fan = _DEVICE_FAN if lazy else _FAN
        self._stale = False
        self._sums: list[Tensor] = []
        nodes = capacity
        with torch.inference_mode(mode=False):  # updates come in any mode
            while not self._sums or nodes > 1:
                nodes = -(-nodes // self._fan) if self._sums else nodes
                self._sums.append(torch.zeros(-(-nodes // self._fan) * self._fan, dtype=torch.float64, device=device))
            # zero stands for "no leaf above zero"; both trees share the leaves
            self._leasts = [self._sums[0]] + [torch.zeros_like(level) for level in self._sums[1:]]
            self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._trees = ((self._sums, _sum), (self._leasts, _least))
        self.device = self._sums[0].device  # as tensors name it: "cuda" becomes "cuda:0"
        self._on_cpu = self.device.type == "cpu"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle capacity, device and leaves: parents follow from these."""
        return _restored, (self.capacity, self.device, self.leaves(self.capacity))

    @property
    def nbytes(self) -> int:
        """Bytes of all levels (about 10.3 for each slot)."""
        return sum(level.nbytes for level in (*self._sums, *self._leasts[1:]))

    @property
    def total(self) -> float | Tensor:
        """Sum of all values; 0-dim tensor on devices other than the CPU. O(1)."""
        self._recompute()
        total = self._sums[-1][0]
        return float(total) if self._on_cpu else total

    @property
    def known_empty(self) -> bool:
        """Whether all values are zero; False on devices other than the CPU, where to ask would be a host sync."""
        return self._on_cpu and float(self.total) <= 0

    @property
    def minimum(self) -> float | Tensor:
        """Smallest value above zero, infinity if there is none; 0-dim tensor on devices other than the CPU. O(1)."""
        self._recompute()
        least = self._leasts[-1][0]
        least = torch.where(least > 0, least, torch.inf)
        return float(least) if self._on_cpu else least

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write values; of equal slots in one call the last one wins. O(n log capacity).

        Args:
            slots: int64 `[n]` on the tree's device, in `[0, capacity)`, contiguous.
            values: float64 `[n]` on the tree's device, finite and at least 0, contiguous.

        Raises:
            SlotError: on the CPU, for a slot outside the tree; nothing is written.
        """
        if self._on_cpu:
            check_slots(slots, self.capacity)
        slots, order = slots.sort(stable=True)
        last = torch.searchsorted(slots, slots, right=True) - 1  # equal slots all write the value of the last one
        self._sums[0].index_copy_(0, slots, values.index_select(0, order).index_select(0, last) + 0.0)
        if self._lazy:
            self._stale = True
            return
        for level in range(1, len(self._sums)):
            slots = slots // self._fan
            if slots.shape[0] >= self._sums[level].shape[0]:
                self._update_range(level, 0, self._sums[level].shape[0])
            else:
                self._update_nodes(level, slots)

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to the slots `(start + i) % capacity`, `i < count`. O(count), parents once each.

        Args:
            start: in `[0, capacity)`.
            count: in `[0, capacity]`.
            value: finite and at least 0; a 0-dim tensor is read without a host sync on its own device.
        """
        end = min(start + count, self.capacity)
        for first, stop in ((start, end), (0, count - (end - start))):
            if first < stop:
                self._sums[0][first:stop].fill_(value).add_(0.0)
                self._update_above(first, stop)

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw slot `i` with probability `value[i] / total` for each number; never a slot whose value is zero.

        The slot is the one in which `uniform * total` falls when all values are laid end to end in the order of slots,
        so sorted numbers give sorted slots (stratified draws).

        Args:
            uniforms: float64 `[B]` in `[0, 1]`, both ends included, on the tree's device, contiguous.

        Returns:
            Slots int64 `[B]` and their values float64 `[B]`. A tree whose values are all zero gives slot 0 with value
            0; `NativeTree` raises `ValueError`.
        """
        self._recompute()
        total = self._sums[-1][0]
        at = torch.where(total > 0, (uniforms * total).clamp_(min=0.0), -1.0)  # all values zero: slot 0, never outside
        nodes = torch.zeros_like(uniforms, dtype=torch.int64)
        for level in self._sums[-2::-1] or self._sums:  # the last one holds the total alone
            children = level.view(-1, self._fan).index_select(0, nodes)
            ends = children.cumsum(dim=1)
            present = ends * (children > 0)  # a child of value zero is never chosen, whatever rounding did to its end
            at = torch.minimum(at, torch.nextafter(present.amax(dim=1), self._zero))
            chosen = (present > at.unsqueeze(1)).byte().argmax(dim=1, keepdim=True)
            at = at - pad(ends, (1, 0)).gather(1, chosen).squeeze(1)
            nodes = nodes * self._fan + chosen.squeeze(1)
        return nodes, self._sums[0].index_select(0, nodes)

    def sample(
        self, uniforms: Tensor, beta: float, dtype: torch.dtype, ring: Ring | SharedRing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw slots with their importance weights and generations; see `draw`.

        Args:
            uniforms: float64 `[B]` in `[0, 1]` on the tree's device, contiguous.
            beta: exponent of the weights `(value / minimum) ** -beta`.
            dtype: floating dtype of the weights.
            ring: generations of the slots.

        Returns:
            Slots int64 `[B]`, weights `[B]`, generations int64 `[B]`.
        """
        slots, values = self.draw(uniforms)
        least = self.minimum
        if isinstance(least, float):
            array = values.numpy()  # numpy starts an operation in a third of torch's time
            np.power(np.divide(array, least, out=array), -beta, out=array)
        else:
            values.div_(least).pow_(-beta)
        return slots, values.to(dtype), ring.generations_of_rows(slots)

    def leaves(self, rows: int) -> Tensor:
        """Return the values of the slots `[0, rows)`: float64, a copy."""
        return self._sums[0][:rows].clone()

    def load(self, leaves: Tensor) -> None:
        """Set the values of the first slots to `leaves` (float64 `[rows]`), and all others to zero. O(capacity).

        Raises:
            OptionError: on the CPU, for a value that is negative or not finite; nothing is changed.
        """
        if self._on_cpu and not bool(((leaves >= 0) & (leaves < torch.inf)).all()):
            msg = "the values of a priority tree must be finite and at least 0: nothing has been written"
            raise OptionError(msg)
        self._sums[0].zero_()
        torch.add(leaves, 0.0, out=self._sums[0][: leaves.shape[0]])
        self._update_above(0, self.capacity)

    def _recompute(self) -> None:
        """Compute all parents, if they are lazy and leaves have changed."""
        if self._stale:
            self._stale = False
            for level in range(1, len(self._sums)):
                self._update_range(level, 0, self._sums[level].shape[0])

    def _update_above(self, begin: int, end: int) -> None:
        """Recompute all nodes above the leaves `[begin, end)`, now or before they are read."""
        if self._lazy:
            self._stale = True
            return
        for level in range(1, len(self._sums)):
            begin, end = begin // self._fan, -(-end // self._fan)
            self._update_range(level, begin, end)

    def _update_range(self, level: int, begin: int, end: int) -> None:
        below = slice(begin * self._fan, min(end * self._fan, self._sums[level - 1].shape[0]))
        for tree, combine in self._trees:
            made = combine(tree[level - 1][below].view(-1, self._fan))
            tree[level][begin : begin + made.shape[0]] = made

    def _update_nodes(self, level: int, nodes: Tensor) -> None:
        """Recompute the nodes listed; for a node listed twice the same number is written twice."""
        for tree, combine in self._trees:
            tree[level].index_copy_(0, nodes, combine(tree[level - 1].view(-1, self._fan).index_select(0, nodes)))


@final
class NativeTree(PriorityTree):
    """The tree of the native extension, on the CPU: one native call per batch, without the GIL for large ones.

    Args:
        tree: the native tree, which may be in memory shared with other processes.
    """

    native: SumTree
    device = _CPU

    def __init__(self, tree: SumTree) -> None:
        self.capacity, self.native = tree.capacity, tree
        # outputs of `sample` are made with empty_like of these, which is faster than torch.empty
        self._like_slots = torch.empty(0, dtype=torch.int64, device="cpu")
        self._like_weights = torch.empty(0, dtype=torch.float32, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return self.native.nbytes

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self.native.total

    @property
    def known_empty(self) -> bool:
        """Whether all values are zero."""
        return self.native.total <= 0

    @property
    def minimum(self) -> float:
        """Smallest value above zero, infinity if there is none."""
        return self.native.minimum

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write values; see `PriorityTree.set`."""
        try:
            self.native.set(slots.data_ptr(), values.data_ptr(), slots.shape[0])
        except IndexError:
            check_slots(slots, self.capacity)
            raise

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to a run of slots; see `PriorityTree.set_run`."""
        self.native.set_run(start, count, float(value))

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw slots; see `PriorityTree.draw`."""
        values = torch.empty_like(uniforms)
        slots = torch.empty_like(uniforms, dtype=torch.int64)
        self.native.draw(uniforms.data_ptr(), uniforms.shape[0], slots.data_ptr(), values.data_ptr())
        return slots, values

    def sample(
        self, uniforms: Tensor, beta: float, dtype: torch.dtype, ring: Ring | SharedRing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw slots with their importance weights and generations in one native call; see `PriorityTree.sample`.

        Raises:
            ValueError: if the total is zero or not finite.
        """
        if dtype not in WEIGHT_DTYPES:
            return super().sample(uniforms, beta, dtype, ring)
        n = uniforms.shape[0]
        if self._like_slots.shape[0] != n or self._like_weights.dtype is not dtype:
            self._like_slots = torch.empty(n, dtype=torch.int64, device="cpu")
            self._like_weights = torch.empty(n, dtype=dtype, device="cpu")
        slots, generations = torch.empty_like(self._like_slots), torch.empty_like(self._like_slots)
        weights = torch.empty_like(self._like_weights)
        self.native.sample(
            uniforms.data_ptr(),
            n,
            beta,
            ring.native_state(),
            slots.data_ptr(),
            weights.data_ptr(),
            dtype is torch.float32,
            generations.data_ptr(),
        )
        return slots, weights, generations

    def leaves(self, rows: int) -> Tensor:
        """Return the values of the first slots, a copy."""
        out = torch.empty(rows, dtype=torch.float64, device="cpu")
        self.native.leaves(out.data_ptr(), rows)
        return out

    def load(self, leaves: Tensor) -> None:
        """Set all values; see `PriorityTree.load`."""
        self.native.load(leaves.contiguous().data_ptr(), leaves.shape[0])


def _restored(capacity: int, device: torch.device, leaves: Tensor) -> PriorityTree:
    """Return a tree from its pickled state, in the implementation that this process has."""
    tree = make_tree(capacity, device)
    tree.load(leaves)
    return tree


def _sum(children: Tensor) -> Tensor:
    return children.cumsum(dim=1)[:, -1]  # `sum` adds in an order of its own


def _least(children: Tensor) -> Tensor:
    least = torch.where(children > 0, children, torch.inf).amin(dim=1)
    return torch.where(least < torch.inf, least, 0.0)
