"""What every unit can do: change the plan of a batch before the gather, and finish the batch after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ostinato.core.kinds import show_path
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ostinato.core.episodes.keys import Episodes
    from ostinato.core.records import Plan, View
    from ostinato.core.rows import Path

__all__ = ["SampleUnit", "check_count", "refuse_fields", "require_field", "require_like"]


class SampleUnit(ABC):
    """Base of all units; a unit of your own subclasses it and implements `expand`.

    *Which* row is drawn is the sampler's, *what it becomes* the unit's: each combines with every sampler. `expand` and
    `roll` run under the buffer's lock, `finish` outside it, maybe in another thread: a unit keeps no state that a batch
    changes.
    """

    episodes: Episodes | None = None
    """Where episodes begin and end; None for a unit that need not know."""
    notes: tuple[str, ...] = ()
    """Keys that it adds to the info, and to TensorDict samples; they are dropped from what is written back."""
    single: bool = False
    """Whether it makes windows of single rows, so that a sampler of slices leaves nothing to do."""
    plain: bool = False
    """Whether it leaves rows as they are, so that any storage will do."""
    options: tuple[str, ...] = ()
    """Attributes that stay as the unit was made: buffers have fitted themselves to them."""
    rank: int = 0
    """Where it stands in a chain: units of lower rank change the plan first; two of one rank exclude each other."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but no option a second time.

        Raises:
            UsageError: for an option.
        """
        if name in self.options and name in self.__dict__:
            msg = f"{name} of a {type(self).__name__} is fixed when it is made, got {value!r}: make another unit"
            raise UsageError(msg)
        super().__setattr__(name, value)

    @property
    def need(self) -> int:
        """Rows that a row must have in its episode, from itself on, to be drawn at all."""
        return 1

    @property
    def span(self) -> int:
        """Rows of one lane that a window takes: a capacity below that is refused."""
        return 1

    @property
    def rows(self) -> int:
        """Records that each row becomes."""
        return 1

    @abstractmethod
    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:
        """Return the plan changed: other records, or other rows to read for some fields. No data is at hand.

        The same arguments give the same plan.

        Args:
            plan: of the rows drawn, or as the unit before left it.
            view: the buffer; `view.episodes` is there where the unit has `episodes`.
            dice: what `roll` gave.
        """

    def roll(self, records: int, view: View, generator: torch.Generator | None) -> Tensor | None:  # noqa: ARG002
        """Return the random numbers of one batch, if the unit needs any: its only source of chance.

        Args:
            records: records of the batch.
            view: the buffer.
            generator: None stands for torch's global one.
        """
        return None

    def finish(self, data: Any, plan: Plan) -> Any:  # noqa: ARG002
        """Return the finished batch. `data` is fresh memory, nested as rows were put in."""
        return data


def require_field(plan: Plan, path: Path, what: str) -> int:
    """Return the position of a field.

    Raises:
        KeyMissingError: naming it, what it is for, and the fields there are.
        KindError: if it holds Python objects.
    """
    position = plan.find(path)
    if position is None and path in {leaf.path for leaf in plan.schema.objects}:
        msg = f"{show_path(path)} ({what}) holds Python objects, such as text: name a field of tensors"
        raise KindError(msg)
    if position is None:
        known = ", ".join(show_path(leaf.path) for leaf in plan.schema.leaves)
        msg = f"rows have no field {show_path(path)} ({what}); they have {known}: name the right one"
        raise KeyMissingError(msg)
    return position


def refuse_fields(plan: Plan, *names: str) -> None:
    """Refuse rows that have a field which a unit would write over.

    Raises:
        SchemaError: naming it.
    """
    objects = {leaf.path for leaf in plan.schema.objects}
    for name in names:
        if plan.find((name,)) is not None or (name,) in objects:
            msg = f"rows have a field {name!r}, which the unit adds to batches: store it under another name"
            raise SchemaError(msg)


def require_like(plan: Plan, first: int, *others: int) -> None:
    """Refuse fields that cannot stand for each other.

    Raises:
        SchemaError: if they have not one dtype and shape.
    """
    leaves = [plan.schema.leaves[position] for position in (first, *others)]
    if len({(leaf.dtype, leaf.shape) for leaf in leaves}) > 1:
        forms = ", ".join(f"{show_path(leaf.path)} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        msg = f"these fields must have one dtype and shape: {forms}; convert them before writing"
        raise SchemaError(msg)


def check_count(name: str, value: Any, least: int) -> int:
    """Return an integer of at least `least`.

    Raises:
        OptionError: otherwise.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        msg = f"{name} must be an integer of at least {least}, got {value!r}"
        raise OptionError(msg)
    return int(value.__index__())
