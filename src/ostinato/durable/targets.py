"""Before and after a save: what a directory may hold to be saved over, and the files that nothing names any more."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ostinato.durable.locks import LOCK_NAME
from ostinato.durable.manifest import MANIFEST_NAME, read_manifest
from ostinato.durable.reader import read_records
from ostinato.durable.records import ArrayRecord
from ostinato.errors import CheckpointError

__all__ = ["check_target", "collect_garbage"]

_OWN_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}\.bin|manifest\.json\.[0-9a-f]{16}\.tmp", re.ASCII)


def check_target(root: Path, format_name: str) -> None:
    """Refuse to save over anything that is not a checkpoint of this format or what is left of one."""
    if not root.exists() and not root.is_symlink():
        return
    if not root.is_dir():
        msg = f"{root} is not a directory: choose a path that is free or holds a checkpoint"
        raise CheckpointError(msg)
    names = sorted(entry.name for entry in root.iterdir())
    if MANIFEST_NAME in names:
        try:
            read_records(root, read_manifest(root, format_name=format_name).body)
        except CheckpointError as error:
            msg = f"will not save over {root}: {error}; remove it or choose another path"
            raise CheckpointError(msg) from error
        return
    foreign = [name for name in names if name != LOCK_NAME and not _OWN_FILE.fullmatch(name)]
    if foreign:
        msg = f"will not save into {root}: it has no checkpoint but other files ({', '.join(foreign[:3])})"
        raise CheckpointError(msg)


def collect_garbage(root: Path, format_name: str) -> None:
    """Remove data files of ours that the manifest does not name; the caller holds the lock.

    What cannot be removed (a mapped file on Windows) waits for a later save. A manifest that cannot be read
    keeps all.
    """
    named: set[str] = set()
    with contextlib.suppress(OSError, CheckpointError):
        if (root / MANIFEST_NAME).exists():
            body = read_manifest(root, format_name=format_name).body
            records = read_records(root, body).values()
            named = {file.file for record in records if isinstance(record, ArrayRecord) for file in record.files}
        for entry in os.scandir(root):
            if entry.name not in named and _OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()
