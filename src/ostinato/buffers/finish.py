"""What is left to do to a batch after its gather: what units compute, and the fields that slices and units add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.core import kinds

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.plan import Plan
    from ostinato.samplers import Sampler
    from ostinato.units import SampleUnit

__all__ = ["finish"]


def finish(data: Any, plan: Plan, unit: SampleUnit | None, sampler: Sampler) -> tuple[Any, dict[Any, Tensor]]:
    """Return the batch, and what there is to say of its records: by name, or by path for fields of the batch."""
    if unit is not None:
        data = unit.finish(data, plan)
    if plan.fields and kinds.is_mapping(data):
        data = kinds.with_fields(data, {(name,): value for name, value in plan.fields.items()})
    marks = {path if len(path) > 1 else path[0]: value for path, value in sampler.marks(plan, data).items()}
    return data, {**plan.notes, **plan.fields, **marks}
