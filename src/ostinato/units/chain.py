"""A list of units as one unit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

from ostinato.core.episodes.tracker import merge_episodes
from ostinato.errors import KindError, OptionError
from ostinato.units.base import SampleUnit
from ostinato.units.hindsight import Hindsight
from ostinato.units.nstep import NStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from ostinato.core.records import Plan, View
    from ostinato.core.rows import Path, Schema


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
    ranks = [unit.rank for unit in units]
    if len(set(ranks)) < len(ranks):
        msg = f"two units of one kind cannot be combined, got {units!r}: leave one out"
        raise OptionError(msg)
    kinds = {type(unit) for unit in units}
    if {NStep, Hindsight} <= kinds:
        msg = "NStep and Hindsight cannot be combined: a new goal changes the rewards of all n steps. Leave one out"
        raise OptionError(msg)
    return _Chain(units)


@final
class _Chain(SampleUnit):
    """Units applied one after the other: each gets the plan of the one before it."""

    def __init__(self, units: list[SampleUnit]) -> None:
        self._units = units
        self.notes = tuple(name for unit in units for name in unit.notes)
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
