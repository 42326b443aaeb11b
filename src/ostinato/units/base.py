"""The base class of units, which turn drawn rows into the records of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ostinato.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.records import Plan, View
    from ostinato.core.rows import Path, Schema


class SampleUnit(ABC):
    """Base class of all units. Subclass it and implement `expand` for a unit of your own.

    The sampler draws rows, and the unit turns each row into records of the batch. Each unit combines with every
    sampler. `expand` and `roll` run under the buffer's lock, `finish` runs outside it and possibly in another thread.
    A unit has no state that depends on a batch.
    """

    episodes: Episodes | None = None
    """Where episodes begin and end; None for a unit that does not need episodes."""
    notes: tuple[str, ...] = ()
    """Keys that the unit adds to the info and to TensorDict samples; they are removed from rows that are written."""
    single: bool = False
    """Whether it makes windows of single rows, and so does not combine with slice samplers."""
    plain: bool = False
    """Whether it returns every plan unchanged, and so works with every storage."""
    options: tuple[str, ...] = ()
    """Attributes that cannot be set again: buffers depend on them."""
    rank: int = 0
    """Position in a list of units: units of lower rank change the plan first; two of one rank cannot be combined."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            UsageError: for one of `options` that was set before.
        """
        if name in self.options and name in self.__dict__:
            msg = f"{name} of a {type(self).__name__} is fixed when it is made, got {value!r}: make another unit"
            raise UsageError(msg)
        super().__setattr__(name, value)

    def shown_options(self) -> str:
        """Class and options, as checkpoints name the unit of their queued draws."""
        return repr(self)

    def check_schema(self, schema: Schema, ends: tuple[Path, ...] = ()) -> None:  # noqa: B027
        """Check the fields of rows: before the first ones are stored, or when the unit meets rows that are there.

        A unit that needs certain fields may raise here already, not only in `expand`.

        Args:
            schema: schema of the rows.
            ends: fields that end episodes, as `view.ends`.

        Raises:
            SchemaError: if the unit cannot be used with these rows; nothing has been stored then.
        """

    @property
    def need(self) -> int:
        """Rows that a row must have in its episode, counted from itself, to be drawn."""
        return 1

    @property
    def span(self) -> int:
        """Rows of one environment that a window covers; a buffer with a smaller capacity raises `CapacityError`."""
        return 1

    @property
    def joins(self) -> bool:
        """Whether what a row becomes depends on other rows of its episode."""
        return self.episodes is not None

    @property
    def rows(self) -> int:
        """Records of the batch for each row drawn."""
        return 1

    @abstractmethod
    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:
        """Return the plan with other records, or with other rows to read for some fields. No data has been read yet.

        The result depends on the arguments alone.

        Args:
            plan: of the rows drawn, or the result of the unit before.
            view: the buffer; it has `episodes` if the unit has.
            dice: the result of `roll`.
        """

    def roll(self, records: int, view: View, generator: torch.Generator | None) -> Tensor | None:  # noqa: ARG002
        """Return the random numbers for one batch, or None. A unit uses no other random numbers.

        Args:
            records: number of records of the batch.
            view: the buffer.
            generator: None stands for torch's global one.
        """
        return None

    def finish(self, data: Any, plan: Plan) -> Any:  # noqa: ARG002
        """Return the finished batch. `data` is a copy, nested like the rows that were added."""
        return data
