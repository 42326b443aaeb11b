"""Ends of streams: the newest row of each buffer becomes the last one of its episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.episodes.tracker import as_path
from ostinato.core.kinds import show_path
from ostinato.errors import KindError, OptionError, UsageError
from ostinato.samplers import SliceSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.episodes.tracker import Key
    from ostinato.core.rows import Path


def end_streams(
    members: Sequence[ReplayBuffer], end_key: Key, terminated_key: Key | None, truncated_key: Key | None
) -> None:
    """End the stream of each buffer; see `ReplayBufferEnsemble.end_streams`. The caller holds the locks.

    All are checked before one is changed.
    """
    end, terminated, truncated = (
        None if key is None else as_path(key) for key in (end_key, terminated_key, truncated_key)
    )
    given = [path for path in (end, terminated, truncated) if path is not None]
    if end is None or len(set(given)) < len(given):
        msg = (
            f"end, terminated and truncated keys must be distinct, got end_key={end_key!r}, terminated_key="
            f"{terminated_key!r} and truncated_key={truncated_key!r}"
        )
        raise OptionError(msg)
    for number, member in enumerate(members):
        _check(member, number, end)
    patches = [_patch(member, end, terminated, truncated) if len(member.storage) else None for member in members]
    for member, patch in zip(members, patches, strict=True):
        if patch is not None:
            slot, values = patch
            member._engine.store.edit_fields(values, slot, swap=False, same=True)  # noqa: SLF001 (one package)


def _check(member: ReplayBuffer, number: int, end: Path) -> None:
    """Check that a buffer holds one stream whose end `end` marks.

    Raises:
        UsageError: naming what does not fit.
    """
    storage, sampler, episodes = member.storage, member.sampler, member.episodes
    known = None if storage.schema is None or not len(storage) else {leaf.path for leaf in storage.schema.leaves}
    found = episodes if episodes is None or known is None else episodes.resolve(known)
    if (
        storage.ndim != 1
        or not (member.writer.in_order and member.writer.mutable)
        or not isinstance(sampler, SliceSampler)
        or (known is not None and (found is None or end not in found.end_paths))
    ):
        msg = (
            "end_streams requires one-dimensional storages, round-robin writers and slice samplers whose episodes end "
            f"at end_key={show_path(end)}, member {number} has {storage!r}, {member.writer!r} and {sampler!r}"
        )
        raise UsageError(msg)
    traj = None if found is None or known is None else found.traj_path
    if traj is not None:
        ids = storage.scores_at(torch.arange(len(storage), device=storage.device), traj)
        if ids is None or not bool((ids == ids[0]).all()):
            msg = (
                "end_streams supports trajectory-keyed slice samplers only if every record of a member carries the "
                f"same trajectory id: those of member {number} have several under {show_path(traj)}, and new rows may "
                "have any of them"
            )
            raise UsageError(msg)


def _patch(
    member: ReplayBuffer, end: Path, terminated: Path | None, truncated: Path | None
) -> tuple[Tensor, dict[Any, Tensor]]:
    """Return the slot of the newest row, and the flags that it gets.

    Raises:
        KindError: if the row has no boolean end flag.
    """
    storage = member.storage
    slot = torch.tensor([(member.cursor - 1) % storage.capacity], dtype=torch.int64, device=storage.device)
    done = storage.scores_at(slot, end)
    if done is None or done.dtype is not torch.bool:
        msg = f"end_streams requires a boolean end_key field, rows have {show_path(end)} as {done and done.dtype}"
        raise KindError(msg)
    values: dict[Any, Tensor] = {end: torch.ones_like(done)}
    cut = None if truncated is None else storage.scores_at(slot, truncated)
    if cut is not None and truncated is not None:
        stop = None if terminated is None else storage.scores_at(slot, terminated)
        values[truncated] = cut | ~(done if stop is None else done | stop)
    return slot, values
