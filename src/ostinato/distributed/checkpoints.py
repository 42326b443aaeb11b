"""Checkpoints of shards: one directory for each, whose name holds the number of shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.durable.manifest import MANIFEST_NAME
from ostinato.errors import LostBufferError, OptionError

if TYPE_CHECKING:
    from ostinato.distributed.shard_client import ShardClient

__all__ = [
    "ShardReport",
    "check_checkpoint_dir",
    "load_shards",
    "report_shards",
    "save_shards",
    "shard_directories",
]


class ShardReport(NamedTuple):
    """State of one shard."""

    shard: int
    """Its number."""
    missing: str | None
    """Why it does not answer; None if it does."""
    rows: int
    """Rows present; this and the next two are 0 while it is missing."""
    write_count: int
    """Rows written to it, including those before its last checkpoint."""
    saved_write_count: int
    """Rows written to it before its last checkpoint; a restart loses those written later."""
    save_error: str | None
    """Why its last checkpoint could not be written; None if it could."""


def _shard_directory(directory: Path, shard: int, shards: int) -> Path:
    return directory / f"shard-{shard:04d}-of-{shards:04d}"


def shard_directories(directory: Path | None, shards: int) -> list[str | None]:
    """Return the directory of each shard's checkpoint; None for each without `directory`."""
    return [None if directory is None else str(_shard_directory(directory, i, shards)) for i in range(shards)]


def check_checkpoint_dir(directory: Path | None, shards: int, *, resume: bool) -> None:
    """Check what a checkpoint directory holds before shards are started.

    Raises:
        OptionError: It holds checkpoints of another number of shards, or any checkpoints without `resume`.
    """
    if directory is None:
        return
    own = {Path(name).name for name in shard_directories(directory, shards) if name is not None}
    found = {path.parent.name for path in directory.glob(f"shard-*-of-*/{MANIFEST_NAME}")}
    if found - own:
        msg = (
            f"{directory} holds checkpoints of another number of shards, such as {min(found - own)}: make as many, or "
            "take another checkpoint_dir"
        )
        raise OptionError(msg)
    if found and not resume:
        msg = f"{directory} holds checkpoints already: resume=True begins with them; else take another checkpoint_dir"
        raise OptionError(msg)
    if resume and own - found:
        warnings.warn(
            f"resume=True finds {len(found)} of {shards} checkpoints in {directory}: the other shards begin empty",
            UserWarning,
            stacklevel=3,
        )


def save_shards(shards: ShardClient, directory: Path) -> dict[int, Any]:
    """Save the present shards, all at once; return the row counts of each checkpoint.

    Raises:
        NoAnswerError: No shard answers.
    """
    while True:
        arguments = {i: (str(_shard_directory(directory, i, len(shards))),) for i in shards.present()}
        found = shards.call("save", arguments)
        if found:
            return found


def load_shards(shards: ShardClient, directory: Path) -> None:
    """Load all shards, all at once.

    Raises:
        CheckpointError: A checkpoint does not exist, or does not match; other shards may be loaded then.
        LostBufferError: A shard is missing; the others are loaded.
    """
    arguments = {i: (str(_shard_directory(directory, i, len(shards))),) for i in shards.present()}
    missing = sorted(set(range(len(shards))) - set(shards.call("load", arguments)))
    if missing:
        msg = f"shards {missing} of {len(shards)} do not answer: they have not loaded {directory}"
        raise LostBufferError(msg)


def report_shards(shards: ShardClient) -> list[ShardReport]:
    """Return the state of each shard."""
    found = shards.call_all("describe")
    fields = ("rows", "write_count", "saved_write_count", "save_error")
    nothing = dict(zip(fields, (0, 0, 0, None), strict=True))
    return [
        ShardReport(i, shards.missing.get(i), *(found.get(i, nothing)[name] for name in fields))
        for i in range(len(shards))
    ]
