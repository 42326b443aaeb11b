"""The buffer between rollouts and trainer of miles, on disk: `--custom-async-data-buffer-path my_module.MyBuffer`.

`docs/recipes/miles.md` shows a subclass. miles is imported where samples are read again, by the name in `sample`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import pkgutil
import uuid
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from ostinato.errors import OptionError, WaitTimeoutError
from ostinato.groups import GroupBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["DataBuffer"]

_PREFIX = "rollout/fully_async/"
_LEASE_S = 30 * 24 * 3600.0
"""A lease ends when its step is trained, or when the folder is opened again."""


class DataBuffer:
    """Finished groups of samples, in a `GroupBuffer`: what `put` has stored survives the process.

    `get` hands out a group once. It is trained when `get` is called with a later version; groups that were handed out
    and not trained are handed out again after a restart. For one asyncio loop; calls wait for the disk.

    Args:
        record: What miles gives: `args`, of which `max_weight_staleness` is read, and `unused_handler_fn`, which is
            called with the prompt group of each group that is not used.

    Raises:
        OptionError: The class has no `path`.
        CheckpointError: Another process has the folder open.
    """

    path: ClassVar[str | Path | None] = None
    """Folder of the groups; set in a subclass."""
    sample: ClassVar[str] = "miles.utils.types:Sample"
    """The dataclass of a sample, as `module:name`, with an enumeration `Status`."""

    def __init__(self, record: Any) -> None:
        if self.path is None:
            msg = f"{type(self).__name__} needs the folder of its groups: set `path` in a subclass of DataBuffer"
            raise OptionError(msg)
        self.args, self._unused = record.args, record.unused_handler_fn
        self.groups = GroupBuffer(self.path, size=1, lease_s=_LEASE_S)
        """The groups, for `position` and `stats`."""
        for name in self.groups.leases():
            self.groups.release(name)
        self._given: dict[str, int] = {}
        """Leases that are not trained yet, and the version in which each was handed out."""
        self._arrived = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._staleness: list[int] = []

    async def put(self, input: Any) -> None:  # noqa: A002
        """Store a finished group; one with an aborted sample goes to the handler.

        Args:
            input: `prompt_group`, `group` (samples, or lists of samples) and `weight_version`.

        Raises:
            CheckpointError: A field of a sample cannot be saved; nothing is stored.
        """
        samples = [*_flat(input.group)]
        if any(sample.status == sample.Status.ABORTED for sample in samples):
            self._reject(input.prompt_group, "aborted_groups_filtered")
            return
        names = ("prompt_group", "group", "weight_version")
        values = {name: _plain(getattr(input, name)) for name in names}
        versions = [sample.oldest_weight_version for sample in samples if sample.oldest_weight_version is not None]
        name, oldest = uuid.uuid4().hex, min(versions, default=None)
        self.groups.admit([{**values, "oldest": oldest}], ids=[name])
        self.groups.append(name, {"tokens": [], "version": oldest}, id="group")
        self._arrived.set()

    async def get(self, current_version: int) -> Any:
        """Return the next group that is fresh enough, as `put` got it; wait for one.

        Args:
            current_version: Version of the policy; groups handed out in earlier versions are trained.
        """
        for name in [name for name, version in self._given.items() if version < current_version]:
            self.groups.ack(name, step=current_version)
            del self._given[name]
        while True:
            try:
                lease = self.groups.lease(timeout_s=0)
            except WaitTimeoutError:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            (group,) = lease.groups
            values = self._samples(group.prompt)
            oldest = values.pop("oldest")
            staleness = 0 if oldest is None else current_version - oldest
            most = getattr(self.args, "max_weight_staleness", None)
            if most is None or staleness <= most:
                self._given[lease.id] = current_version
                self._staleness.append(staleness)
                return SimpleNamespace(**values)
            self.groups.drop(group.id, "stale")
            self.groups.release(lease)
            self._reject(values["prompt_group"], "stale_groups_filtered")

    def _reject(self, prompt_group: Any, reason: str) -> None:
        self._counts[reason] += 1
        self._unused(prompt_group)

    def _samples(self, value: Any) -> Any:
        """Return a value with the samples that `_plain` took apart."""
        if isinstance(value, list):
            return [self._samples(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "sample" not in value:
            return {name: self._samples(each) for name, each in value.items()}
        kind, fields = pkgutil.resolve_name(self.sample), value["sample"]
        return kind(**{**fields, "status": kind.Status[fields["status"]]})

    def get_metrics(self) -> dict[str, float]:
        """Return the groups that wait, and what was counted since the last call; nothing is ever evicted."""
        counts = {name: self._counts.get(name, 0) for name in ("aborted_groups_filtered", "stale_groups_filtered")}
        found: dict[str, float] = {"queue_size": self.groups.stats().counts["ready"], **counts}
        if self._staleness:
            found["avg_staleness"] = sum(self._staleness) / len(self._staleness)
            found["max_staleness"] = max(self._staleness)
        self._counts.clear()
        self._staleness.clear()
        return {_PREFIX + name: float(value) for name, value in found.items()}


def _flat(group: Any) -> Iterator[Any]:
    """Yield the samples of a list, or of lists in it."""
    for each in group:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def _plain(value: Any) -> Any:
    """Return samples as dicts of their fields, with the name of the status."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {"sample": {name: each.name if isinstance(each, enum.Enum) else each for name, each in fields.items()}}
