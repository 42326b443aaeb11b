"""Checkpoints of shards: one directory for each, whose name holds the number of shards."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.durable import files
from ostinato.durable.manifest import MANIFEST_NAME, parse_json
from ostinato.durable.progress import SHARDS, begin
from ostinato.errors import CheckpointError, DamagedFileError, LostBufferError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ostinato.core.rows import Schema
    from ostinato.distributed.shard_client import ShardClient


FLEET_NAME = "fleet.json"
"""File beside the directories of the shards, with what a checkpoint says about all of them."""
_FLEET_FORMAT = "ostinato-fleet"
_FLEET_VERSION = 1
_COUNTS = ("written", "drawn")


class CheckedCheckpoint(NamedTuple):
    """What a shard found in a checkpoint that it can load."""

    fields: str | None
    """Fields of its rows; None if it has no schema."""
    fleet: dict[str, Any] | None
    """What was saved about all shards; None for a checkpoint of an earlier version."""


class ShardReport(NamedTuple):
    """State of one shard."""

    shard: int
    """Its number."""
    missing: str | None
    """Why it does not answer; None if it does."""
    rows: int = 0
    """Rows present; this and the next two are 0 while it is missing."""
    write_count: int = 0
    """Rows written to it, including those before its last checkpoint."""
    saved_write_count: int = 0
    """Rows written to it before its last checkpoint; a restart loses those written later."""
    save_error: str | None = None
    """Why its last checkpoint could not be written; None if it could."""
    save_failures: int = 0
    """How many checkpoints in a row could not be written; 0 after one that could."""
    schema: str | None = None
    """Its fields, which are those of all shards; None before the first rows, and for a storage without fields."""
    rows_drawn: int = 0
    """Rows drawn from it since its actor was started, restored checkpoints included."""


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


# -- actors of one shard that follow each other -----------------------------------------------------------------------


def _era_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.era")


def begin_saving(path: Path) -> int:
    """Return the era of a shard's actor that has just started, and write it beside the directory of its checkpoint.

    Later actors of the shard have greater ones, also on machines whose clocks are behind. Where the file cannot be
    written, no checkpoint can be written either.
    """
    era = max(int(time.time()), _read_era(path) + 1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.atomic_write(_era_file(path), f"{era}\n".encode())
    return era


def check_era(path: Path, era: int) -> None:
    """Check that no later actor of the shard saves to the directory.

    An actor whose machine was cut off continues for a while after Ray has replaced it.

    Raises:
        CheckpointError: A later one does.
    """
    if _read_era(path) > era:
        msg = (
            f"another actor of this shard, which was started later, saves to {path}: this one was replaced, probably "
            "because its machine could not be reached, and does not save any more"
        )
        raise CheckpointError(msg)


def _read_era(path: Path) -> int:
    """Return the era of the last actor that saves to a directory; 0 if none does."""
    try:
        return int(_era_file(path).read_text())
    except (OSError, ValueError):
        return 0


# -- what is saved about all shards -----------------------------------------------------------------------------------


def write_fleet(directory: Path, shards: int, schema: Schema | None, limits: Mapping[str, Any] | None) -> None:
    """Write or replace the file about all shards of a checkpoint. After a crash, the old or the new one is there.

    Args:
        directory: Directory of the checkpoint.
        shards: Number of shards.
        schema: Schema of the rows; None for none.
        limits: Counts and rules of the rate limiter; None for none.
    """
    fields = [] if schema is None else [str(leaf) for leaf in (*schema.leaves, *schema.objects)]
    body = {
        "format": _FLEET_FORMAT,
        "version": _FLEET_VERSION,
        "shards": shards,
        "fields": fields,
        "limiter": None if limits is None else dict(limits),
    }
    files.atomic_write(directory / FLEET_NAME, json.dumps(body, indent=2).encode() + b"\n")


def read_fleet(directory: Path) -> dict[str, Any] | None:
    """Read what `write_fleet` wrote; None if there is no such file, as in checkpoints of earlier versions.

    Raises:
        DamagedFileError: It is not such a file.
        CheckpointError: It was written by a later version.
    """
    path = directory / FLEET_NAME
    try:
        body = parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    if not isinstance(body, dict) or body.get("format") != _FLEET_FORMAT or type(body.get("version")) is not int:
        msg = f"{path} is damaged: it does not describe a checkpoint of shards"
        raise DamagedFileError(msg)
    if body["version"] > _FLEET_VERSION:
        msg = f"{path} has version {body['version']}, this release reads up to {_FLEET_VERSION}: update ostinato"
        raise CheckpointError(msg)
    limits = body.get("limiter")
    whole = isinstance(limits, dict) and all(type(limits.get(name)) is int and limits[name] >= 0 for name in _COUNTS)
    if limits is not None and not whole:
        msg = f"{path} is damaged: its rate limiter has no counts"
        raise DamagedFileError(msg)
    return body


def check_same_schema(schemas: Mapping[int, str | None], source: str) -> None:
    """Check that shards have rows of one schema, before they are used together.

    Args:
        schemas: The fields of the rows of each shard; None for a shard without rows.
        source: Where the rows come from, for the message.

    Raises:
        CheckpointError: They have not.
    """
    known = {shard: schema for shard, schema in schemas.items() if schema is not None}
    first = min(known, default=0)
    for shard, schema in sorted(known.items()):
        if schema != known[first]:
            msg = (
                f"{source} of shards {first} and {shard} hold rows of different schemas, [{known[first]}] and "
                f"[{schema}], so that no batch could be made of both: nothing was loaded"
            )
            raise CheckpointError(msg)


# -- saving and loading -----------------------------------------------------------------------------------------------


def save_shards(shards: ShardClient, directory: Path) -> dict[int, Any]:
    """Save the present shards, all at once; return the row counts of each checkpoint.

    Raises:
        NoAnswerError: No shard answers.
    """
    while True:
        arguments = {i: (str(_shard_directory(directory, i, len(shards))),) for i in shards.present()}
        begin(len(arguments), SHARDS)
        found = shards.call("save", arguments)
        if found:
            return found


def load_shards(shards: ShardClient, directory: Path, shard: int | None = None) -> dict[str, Any] | None:
    """Load all shards, or one, all at once, after all checkpoints were checked.

    Returns:
        What was saved about the whole fleet; None for a checkpoint of an earlier version.

    Raises:
        CheckpointError: A checkpoint does not exist, or does not match; nothing has changed. Or the rows of one are
            damaged; other shards may be loaded then.
        LostBufferError: A shard is missing; the others are loaded.
    """
    wanted = range(len(shards)) if shard is None else [shard]
    arguments = {i: (str(_shard_directory(directory, i, len(shards))),) for i in shards.present() if i in wanted}
    begin(2 * len(arguments), SHARDS)
    checked = shards.call("check_load", arguments)
    check_same_schema({i: found.fields for i, found in checked.items()}, f"the checkpoints in {directory}")
    loaded = shards.call("load", {i: arguments[i] for i in checked})
    require_all(shards, wanted, loaded, f"they have not loaded {directory}")
    return next((found.fleet for found in checked.values()), None)


def require_all(shards: ShardClient, wanted: Iterable[int], answered: Iterable[int], what: str) -> None:
    """Raise `LostBufferError` if some shards have not answered; `what` says what they have not done."""
    missing = sorted(set(wanted) - set(answered))
    if missing:
        msg = f"shards {missing} of {len(shards)} do not answer: {what}"
        raise LostBufferError(msg)


def report_shards(shards: ShardClient) -> list[ShardReport]:
    """Return the state of each shard."""
    found = shards.call_all("describe")
    for one in found.values():
        shards.failures.warn(one["failures"])
    return [
        ShardReport(i, shards.missing.get(i), *(found[i][name] for name in ShardReport._fields[2:] if i in found))
        for i in range(len(shards))
    ]
