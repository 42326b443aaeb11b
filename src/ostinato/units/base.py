"""The base class of units, which turn drawn rows into the records of a batch, and a list of units as one unit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final

from ostinato.core.episodes.tracker import Episodes, as_path, merge_episodes
from ostinato.errors import KindError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from ostinato.core.episodes.tracker import Key
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
    plan_fields: tuple[str, ...] = ()
    """Fields of a plan (`Plan.fields`) that `finish` reads; a load checks that queued draws have them."""
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

    _found: tuple[Any, Any] = (None, None)  # a schema, and the result of `_find` for it

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

    def _fields(self, plan: Plan) -> Any:
        """Return the positions of the fields of a unit, which `_find` looks up once for each schema."""
        schema, found = self._found  # read once: another buffer may share the unit
        if schema is not plan.schema:
            found = self._find(plan)
            self._found = (plan.schema, found)
        return found

    def _find(self, plan: Plan) -> Any:  # noqa: B027
        """Return the positions of the fields in the schema of a plan."""

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


def episodes_of(done_key: Key | None) -> Episodes:
    """Return the episodes of a unit: those that a field ends, for None those of the buffer or of the usual flags."""
    return Episodes() if done_key is None else Episodes(end_key=as_path(done_key))


def chain_units(given: SampleUnit | Sequence[SampleUnit] | None) -> SampleUnit | None:
    """Return the unit of a buffer: the one given, or one unit that applies those of a list in the order of their ranks.

    Raises:
        KindError: if something is not a unit.
        OptionError: if two units cannot be combined.
    """
    if given is None:
        return None
    units: list[SampleUnit] = []
    for unit in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(unit, SampleUnit):
            msg = f"sample_unit must be a SampleUnit instance or a list of them, got {type(unit).__name__}"
            raise KindError(msg)
        units.append(unit)
    if not units:
        msg = "sample_unit is an empty list: name a unit, or leave it out"
        raise OptionError(msg)
    if len(units) == 1:
        return units[0]
    units.sort(key=lambda unit: unit.rank)
    if len({unit.rank for unit in units}) < len(units):
        msg = (
            "two units of one kind cannot be combined, nor NStep and Hindsight, since a new goal changes the rewards "
            f"of all n steps: got {units!r}, leave one out"
        )
        raise OptionError(msg)
    return _Chain(units)


@final
class _Chain(SampleUnit):
    """Units applied one after the other: each gets the plan of the one before it."""

    def __init__(self, units: list[SampleUnit]) -> None:
        self._units = units
        self.notes = tuple(name for unit in units for name in unit.notes)
        self.plan_fields = tuple(name for unit in units for name in unit.plan_fields)
        self.single = any(unit.single for unit in units)
        self.episodes = merge_episodes([unit.episodes for unit in units])

    def __repr__(self) -> str:
        """The units."""
        return repr(self._units)

    def shown_options(self) -> str:
        """The units with their options."""
        return f"[{', '.join(unit.shown_options() for unit in self._units)}]"

    def check_schema(self, schema: Schema, ends: tuple[Path, ...] = ()) -> None:
        """Check rows for all units."""
        for unit in self._units:
            unit.check_schema(schema, ends)

    @property
    def rows(self) -> int:
        """Records of the batch for each row drawn: the product over the units."""
        return math.prod(unit.rows for unit in self._units)

    @property
    def need(self) -> int:
        """Rows that a row must have in its episode: the largest number of the units."""
        return max(unit.need for unit in self._units)

    @property
    def joins(self) -> bool:
        """Whether one of the units joins rows."""
        return any(unit.joins for unit in self._units)

    @property
    def span(self) -> int:
        """Rows that a window of windows covers."""
        return sum(unit.span - 1 for unit in self._units) + 1

    def roll(self, records: int, view: View, generator: torch.Generator | None) -> Tensor | None:
        """Return the random numbers of the unit that needs some.

        Raises:
            OptionError: if several units need random numbers.
        """
        found = None
        for unit in self._units:
            dice = unit.roll(records, view, generator)
            if dice is not None and found is not None:
                msg = f"only one unit of a list can need random numbers, got {self._units!r}: leave one out"
                raise OptionError(msg)
            found = dice if found is None else found
            records *= unit.rows
        return found

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:
        """Return the plan after all units."""
        for unit in self._units:
            plan = unit.expand(plan, view, dice)
        return plan

    def finish(self, data: Any, plan: Plan) -> Any:
        """Return the batch finished by all units."""
        for unit in self._units:
            data = unit.finish(data, plan)
        return data
