"""Direct calls in buffers that track episodes: slices, n-step transitions and stacks of frames.

One native call records the episodes of the rows it writes, and one draws, finds the windows, reads and sums their rows.
They apply where flags and numbers in the rows tell where episodes end; see `ostinato.buffers.direct`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ostinato._backend import backend
from ostinato.core.records import Plan
from ostinato.errors import OstinatoError
from ostinato.samplers import RandomSampler, SliceSampler
from ostinato.storages.table import register_windows
from ostinato.units import FrameStack, NStep

if TYPE_CHECKING:
    from ostinato._native import DirectWindows, TrackedEpisodes
    from ostinato.buffers.reader import Reader
    from ostinato.core.rows import Schema
    from ostinato.storages.table import Registration, Source, Table

_ANCHORS, _ROWS, _OTHERS = 0, 1, 2
"""The sources of the rows of a batch: the rows drawn, their windows, and the rows after or beside these."""


def tracked_episodes(engine: Reader) -> tuple[TrackedEpisodes, ...] | None:
    """Return how direct calls record the episodes of a reader, and of the views that get its writes.

    None if fields do not tell them as native code reads them.
    """
    native: Any = backend.native
    trackers = [reader.tracker for reader in (engine.store.readers if engine.own else [engine])]
    found = [(tracker, tracker.fields_read(engine.storage)) for tracker in trackers if tracker is not None]
    if any(fields is None for _, fields in found):
        return None
    return tuple(native.TrackedEpisodes(tracker, *fields) for tracker, fields in found if fields is not None)


def direct_windows(engine: Reader, table: Table, schema: Schema) -> DirectWindows | None:
    """Return the direct draws of windows; None if the parts draw others, or single rows. Needs tracked episodes."""
    native: Any = backend.native
    unit, sampler = engine.unit, engine.sampler
    if unit is None:
        if not isinstance(sampler, SliceSampler) or type(sampler) is not SliceSampler or not sampler.full:
            return None
        return native.DirectWindows.slices(sampler.num_slices or 0, sampler.slice_len or 0)  # type: ignore[no-any-return]
    if type(sampler) is not RandomSampler or not isinstance(unit, (NStep, FrameStack)) or not len(engine.storage):
        return None
    try:
        records = torch.zeros(1, dtype=torch.int64, device="cpu")
        plan = unit.expand(Plan(schema, records, records), engine.view(), None)
        found = register_windows(table, plan)
    except OstinatoError:  # the general way raises it
        return None
    if found is None:
        return None
    try:
        return _windows_of(unit, schema, *found)
    except ValueError:  # a dtype that DLPack does not know
        return None


def _windows_of(
    unit: NStep | FrameStack, schema: Schema, registration: Registration, sources: list[Source]
) -> DirectWindows | None:
    native: Any = backend.native
    templates = [torch.empty((1, *shape), dtype=dtype, device="cpu") for shape, dtype in registration.forms]
    if isinstance(unit, NStep):
        summed = [source.weights for source in sources if source.weights is not None]
        if schema.kind not in {"dict", "tensordict"} or len(summed) != 1:
            return None
        roles = [_ANCHORS, *[_OTHERS if source.weights is None else _ROWS for source in sources[1:]]]
        keys = (*(schema.keys or ()), "steps_to_next_obs", "gamma")
        powers = partial(unit.powers, summed[0].dtype)
        return native.DirectWindows(registration.reader, templates, roles, keys, powers, 0)  # type: ignore[no-any-return]
    if unit.k == 1:
        return None
    roles = [_ANCHORS, *[_ROWS if source.pick is None else _OTHERS for source in sources[1:]]]
    return native.DirectWindows(registration.reader, templates, roles, None, None, unit.k)  # type: ignore[no-any-return]
