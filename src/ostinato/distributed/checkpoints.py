"""Checkpoints of shards: one directory each, which says of how many shards it is one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.durable.manifest import MANIFEST_NAME
from ostinato.errors import LostBufferError, OptionError

if TYPE_CHECKING:
    from ostinato.distributed.shard_client import Fleet

__all__ = ["ShardReport", "check_checkpoints", "checkpoint_folders", "load_shards", "report_shards", "save_shards"]


class ShardReport(NamedTuple):
    """How one shard is."""

    shard: int
    """Its number."""
    missing: str | None
    """Why it does not answer; None if it does."""
    rows: int
    """Rows present; 0 while it is missing, as for the next two."""
    write_count: int
    """Rows written to it, those of before its last checkpoint included."""
    saved_write_count: int
    """Rows written to it before its last checkpoint: a restart loses the rows from there on."""
    save_error: str | None
    """Why its last checkpoint could not be written; None if it could."""


def _folder(directory: Path, shard: int, shards: int) -> Path:
    """Return where a shard is saved; another number of shards does not find it there."""
    return directory / f"shard-{shard:04d}-of-{shards:04d}"


def checkpoint_folders(directory: Path | None, shards: int) -> list[str | None]:
    """Return where each shard is saved; None where none is."""
    return [None if directory is None else str(_folder(directory, i, shards)) for i in range(shards)]


def check_checkpoints(directory: Path | None, shards: int, *, resume: bool) -> None:
    """Look what a directory holds before shards begin there.

    Raises:
        OptionError: if it holds shards of another number, or shards at all that nobody resumes.
    """
    if directory is None:
        return
    mine = {Path(name).name for name in checkpoint_folders(directory, shards) if name is not None}
    held = {path.parent.name for path in directory.glob(f"shard-*-of-*/{MANIFEST_NAME}")}
    if held - mine:
        msg = (
            f"{directory} holds checkpoints of another number of shards, such as {min(held - mine)}: make as many, or "
            "take another checkpoint_dir"
        )
        raise OptionError(msg)
    if held and not resume:
        msg = f"{directory} holds checkpoints already: resume=True begins with them; else take another checkpoint_dir"
        raise OptionError(msg)
    if resume and mine - held:
        warnings.warn(
            f"resume=True finds {len(held)} of {shards} checkpoints in {directory}: the other shards begin empty",
            UserWarning,
            stacklevel=3,
        )


def save_shards(fleet: Fleet, directory: Path) -> dict[int, Any]:
    """Save the shards that are there, all at once; return what each saved."""
    calls = {i: (str(_folder(directory, i, len(fleet))),) for i in fleet.present()}
    return fleet.ask("save", calls, timeout_s=None)


def load_shards(fleet: Fleet, directory: Path) -> None:
    """Load all shards, all at once.

    Raises:
        CheckpointError: if a checkpoint is not there, or does not fit; others may be loaded then.
        LostBufferError: if a shard is missing; the others are loaded.
    """
    calls = {i: (str(_folder(directory, i, len(fleet))),) for i in fleet.present()}
    missing = sorted(set(range(len(fleet))) - set(fleet.ask("load", calls, timeout_s=None)))
    if missing:
        msg = f"shards {missing} of {len(fleet)} do not answer: they have not loaded {directory}"
        raise LostBufferError(msg)


def report_shards(fleet: Fleet) -> list[ShardReport]:
    """Ask each shard how it is."""
    found = fleet.ask("about", dict.fromkeys(fleet.present(), ()))
    fields = ("rows", "write_count", "saved_write_count", "save_error")
    nothing = dict(zip(fields, (0, 0, 0, None), strict=True))
    return [
        ShardReport(i, fleet.missing.get(i), *(found.get(i, nothing)[name] for name in fields))
        for i in range(len(fleet))
    ]
