"""The priority tree that samplers use: leaves for slots, draws in proportion to them.

What lives here: the choice between the compiled tree and the one in torch, and the checks before either. What does
not: what a priority means (exponents, weights, stamps).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato._backend import native
from ostinato.core.draw import check_slots
from ostinato.errors import OptionError
from ostinato.samplers.compiled_tree import CompiledTree
from ostinato.samplers.torch_tree import TorchTree
from ostinato.samplers.values import BAD_VALUE, check_values

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PriorityTree"]


@final
class PriorityTree:
    """Values of the slots [0, capacity), all zero at first; draws slot `i` with probability `value[i] / total`.

    A wide sum tree in float64, eight children to a node. Parents are recomputed from their children, never
    incremented: there is no drift, and equal leaves give equal totals to the last bit, whatever happened before.
    On the CPU with the compiled part each call is one native call for the whole batch, with the interpreter lock
    released for large ones; elsewhere it runs in torch on the device, without a host sync. Both give the same
    results to the last bit for the same numbers.

    Not locked: the buffer's lock orders writes and draws.

    Args:
        capacity: number of slots, at least 1.
        device: where slots and values are.
        compiled: the compiled tree to use, on the CPU; None makes one where it can.

    Example:
        >>> import torch
        >>> from ostinato.samplers.tree import PriorityTree
        >>> tree = PriorityTree(10, torch.device("cpu"))
        >>> tree.set(torch.tensor([2, 7]), torch.tensor([1.0, 3.0], dtype=torch.float64))
        >>> tree.draw(torch.tensor([0.0, 0.2, 0.3, 1.0], dtype=torch.float64))[0].tolist()
        [2, 2, 7, 7]
    """

    def __init__(self, capacity: int, device: torch.device, compiled: CompiledTree | None = None) -> None:
        if capacity < 1:
            msg = f"capacity of a priority tree must be at least 1, got {capacity}"
            raise OptionError(msg)
        self.capacity = capacity
        self.device = torch.empty(
            0, device=device, dtype=torch.float32
        ).device  # "cuda" becomes "cuda:0", which tensors say
        self._on_cpu = self.device.type == "cpu"
        self._check_first = self._on_cpu and native is None  # the compiled part checks by itself
        if compiled is None and native is not None and self._on_cpu:
            compiled = CompiledTree(native.SumTree(capacity))
        self.compiled = compiled
        """The compiled tree, which can do more in one call; None where the tree is in torch."""
        self._tree: CompiledTree | TorchTree = self.compiled or TorchTree(capacity, self.device)

    def __repr__(self) -> str:
        """Size and place; no values, which may be on a device."""
        kind = "torch" if isinstance(self._tree, TorchTree) else "native"
        return f"PriorityTree(capacity={self.capacity}, device={self.device}, {kind})"

    def __getstate__(self) -> dict[str, Any]:
        """Capacity, device and leaves: parents follow from these."""
        return {"capacity": self.capacity, "device": self.device, "leaves": self.leaves()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["capacity"], state["device"])
        self.load(state["leaves"])

    @property
    def nbytes(self) -> int:
        """Bytes of all levels (about 10.3 for each slot)."""
        return self._tree.nbytes

    @property
    def total(self) -> float | Tensor:
        """Sum of all values; 0-dim tensor on devices other than the CPU. O(1)."""
        return self._on_host(self._tree.total)

    @property
    def minimum(self) -> float | Tensor:
        """Smallest value above zero, infinity if there is none; 0-dim tensor on devices other than the CPU. O(1)."""
        return self._on_host(self._tree.minimum)

    @property
    def maximum(self) -> float | Tensor:
        """Largest value, 0 if there is none; 0-dim tensor on devices other than the CPU.

        The compiled tree keeps it from the first time it is asked (which costs O(capacity)) on, so that updates pay for
        it only where it is used; like a write it needs the buffer's lock. Then O(1).
        """
        return self._on_host(self._tree.maximum)

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Write values; of equal slots in one call the last one wins. O(n log capacity).

        Args:
            slots: int64 `[n]` on the tree's device, in `[0, capacity)`.
            values: float64 `[n]` beside them, finite and at least 0.

        Raises:
            SlotError: a slot outside the tree; nothing is written then. (On the CPU: elsewhere the caller checks.)
            OptionError: wrong dtypes, shapes or devices; on the CPU also a bad value. Nothing has been written then.
        """
        slots, values = self._given("slots", slots, torch.int64), self._given("values", values, torch.float64)
        if slots.shape != values.shape:
            msg = f"slots and values must be of one length, got {tuple(slots.shape)} and {tuple(values.shape)}"
            raise OptionError(msg)
        if self._check_first:
            check_slots(slots, self.capacity)
            check_values(values)
        self._tree.set(slots, values)

    def set_run(self, start: int, count: int, value: float | Tensor) -> None:
        """Write one value to the slots `(start + i) % capacity`, `i < count`. O(count), parents once each.

        Args:
            start: in `[0, capacity)`.
            count: in `[0, capacity]`.
            value: finite and at least 0; a 0-dim tensor is read without a host sync on its own device.

        Raises:
            OptionError: a run that does not fit, or (on the CPU) a bad value. Nothing has been written then.
        """
        if not (0 <= start < self.capacity and 0 <= count <= self.capacity):
            msg = (
                f"a run must start in [0, {self.capacity - 1}] and have [0, {self.capacity}] slots (capacity), "
                f"got start={start} and count={count}"
            )
            raise OptionError(msg)
        if self._on_cpu:
            value = float(value)
            if not 0.0 <= value < torch.inf:
                msg = BAD_VALUE.format(value, "")
                raise OptionError(msg)
        self._tree.set_run(start, count, value)

    def get(self, slots: Tensor) -> Tensor:
        """Read values, float64 `[n]`, of slots int64 `[n]`; a copy.

        Raises:
            SlotError: a slot outside the tree. (On the CPU: elsewhere the caller checks.)
            OptionError: wrong dtype, shape or device.
        """
        slots = self._given("slots", slots, torch.int64)
        if self._check_first:
            check_slots(slots, self.capacity)
        return self._tree.get(slots)

    def draw(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw slot `i` with probability `value[i] / total` for each number; never a slot whose value is zero.

        The slot is the one in which `uniform * total` falls when all values lie end to end in the order of slots, so
        sorted numbers give sorted slots (stratified draws).

        Args:
            uniforms: float64 `[B]` in `[0, 1]`, both ends included, on the tree's device.

        Returns:
            Slots int64 `[B]` and their values float64 `[B]`. On devices other than the CPU a tree without mass gives
            slot 0 with value 0: to ask would be a host sync.

        Raises:
            OptionError: on the CPU, if the total is zero or not finite; wrong dtype, shape or device.
        """
        uniforms = self._given("uniforms", uniforms, torch.float64)
        if self._on_cpu:
            total = float(self._tree.total)
            if not 0.0 < total < torch.inf:
                msg = (
                    f"the priorities must sum to a finite number above 0, got {total}: nothing can be drawn before "
                    "a row has a priority above 0 (with eps > 0 every row has)"
                )
                raise OptionError(msg)
        return self._tree.draw(uniforms)

    def clear(self) -> None:
        """Make all values zero. O(capacity)."""
        self._tree.clear()

    def leaves(self, rows: int | None = None) -> Tensor:
        """Return the values of the slots `[0, rows)`, of all by default: float64, a copy.

        Raises:
            OptionError: `rows` outside `[0, capacity]`.
        """
        rows = self.capacity if rows is None else rows
        self._check_rows(rows)
        return self._tree.leaves(rows)

    def load(self, leaves: Tensor) -> None:
        """Make the values of the first slots these (float64 `[rows]`), and all others zero.

        Raises:
            OptionError: more rows than slots, a wrong dtype, shape or device, or (on the CPU) a bad value. Nothing has
                changed then.
        """
        leaves = self._given("leaves", leaves, torch.float64)
        self._check_rows(leaves.shape[0])
        if self._on_cpu:
            check_values(leaves)
        self._tree.load(leaves)

    def _on_host(self, number: float | Tensor) -> float | Tensor:
        return float(number) if self._on_cpu else number

    def _given(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor, contiguous, if it is what the compiled part may be given."""
        if tensor.dtype is not dtype or tensor.dim() != 1 or tensor.device != self.device:
            msg = (
                f"{name} must be a {dtype} tensor [n] on {self.device}, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}: convert it first"
            )
            raise OptionError(msg)
        return tensor.contiguous()

    def _check_rows(self, rows: int) -> None:
        if not 0 <= rows <= self.capacity:
            msg = f"rows must be in [0, {self.capacity}] (capacity), got {rows}"
            raise OptionError(msg)
