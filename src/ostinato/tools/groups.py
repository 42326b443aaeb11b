"""Reports on the folder of a buffer of groups, which are read from its log. No file is changed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ostinato.core.options import number_of
from ostinato.durable.manifest import MANIFEST_NAME
from ostinato.durable.progress import Progress
from ostinato.errors import OstinatoError
from ostinato.groups.buffer import read_group
from ostinato.groups.ledger import DROPPED, STATES, TRAINED
from ostinato.groups.recovery import FORMAT, check_file, log_files, open_log

if TYPE_CHECKING:
    import os

    from ostinato.durable.progress import ProgressOption
    from ostinato.groups.ledger import GroupEntry
    from ostinato.groups.records import Response


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One group, which is not trained or dropped for good."""

    id: str
    """Its id."""
    state: str
    """`waiting`, `running`, `ready`, `leased`, `trained` or `dropped`."""
    detail: str
    """The lease, the training step, or the reason why it was dropped."""
    responses: str
    """Complete responses, and how many it is to have."""
    tokens: int
    """Tokens of the complete responses."""
    rewards: tuple[float, ...] = ()
    """Reward of each response; NaN for none. Rewards of tokens, or of several names, are added."""
    versions: tuple[str, ...] = ()
    """Policy version of each response; the oldest and the newest, if there are several."""


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """One active lease."""

    id: str
    """Its id."""
    consumer: str
    """Whose it is."""
    groups: tuple[str, ...]
    """The ids of its groups."""
    until: str
    """When it expires, in UTC."""


@dataclass(frozen=True, slots=True)
class GroupsReport:
    """One buffer of groups."""

    path: str
    """The folder."""
    format: str
    """Kind of folder."""
    counts: dict[str, int]
    """Groups in each state."""
    dropped: dict[str, int]
    """Groups dropped, by reason."""
    staleness: tuple[str, ...]
    """Groups trained, by the steps between their oldest policy version and their training."""
    tokens: int
    """Tokens appended."""
    step: int
    """The trainer's last step."""
    cursor: str
    """Where the data stands."""
    positions: tuple[str, ...]
    """Steps of the tokens to which consumption can return."""
    nbytes: int
    """Bytes of the files of the log."""
    needed_bytes: int
    """Those that groups need; compaction removes the rest."""
    cuts: tuple[str, ...]
    """Where opening the buffer will cut the log: at a record that is not whole."""
    leases: tuple[LeaseReport, ...]
    """Active leases."""
    groups: tuple[GroupReport, ...]
    """The groups that are not trained or dropped for good, in the order of their admission."""


def inspect_groups(
    path: str | os.PathLike[str], *, read_data: bool = True, progress: ProgressOption = None
) -> GroupsReport:
    """Return a report on the folder of a buffer of groups that no process has open.

    Args:
        path: The folder.
        read_data: Read all responses, for their rewards and versions. Otherwise only the log is read.
        progress: The groups read and their total; see `ostinato.ProgressOption`.

    Raises:
        CheckpointNotFoundError: There is no buffer of groups.
        DamagedFileError: A file is damaged elsewhere than at the end of the log; the message names it.
    """
    found = open_log(Path(path))
    ledger, segments = found.ledger, found.found.segments
    groups = []
    with Progress(progress, "inspect", len(ledger.groups), unit="groups") as bar:
        for group in ledger.groups.values():
            groups.append(_report(group, read_data=read_data))
            bar.advance()
    return GroupsReport(
        path=str(path),
        format=FORMAT,
        counts={state: ledger.counts[state] for state in STATES},
        dropped={reason: count for reason, count in ledger.reasons.items() if count},
        staleness=tuple(
            f"{number_of(steps, 'step')}: {number_of(count, 'group')}"
            for steps, count in sorted(ledger.staleness.items())
        ),
        tokens=ledger.tokens,
        step=ledger.step,
        cursor=str(ledger.cursor or 0),
        positions=tuple(f"step {position.step}" for position in ledger.positions),
        nbytes=sum(segment.nbytes for segment in segments),
        needed_bytes=sum(segment.needed_bytes for segment in segments),
        cuts=tuple(f"{Path(cut.file).name} at byte {cut.offset}: {cut.reason}" for cut in found.cuts),
        leases=tuple(
            LeaseReport(name, lease.consumer, lease.groups, f"{datetime.fromtimestamp(lease.until, UTC):%F %T}")
            for name, lease in ledger.leases.items()
        ),
        groups=tuple(groups),
    )


def _report(group: GroupEntry, *, read_data: bool) -> GroupReport:
    detail = {TRAINED: f"step {group.step}", DROPPED: group.reason}.get(group.state, group.lease)
    responses = read_group(group).responses if read_data else ()
    rewards = tuple(map(reward_of, responses))
    return GroupReport(
        id=group.id,
        state=group.state,
        detail=detail,
        responses=f"{group.complete()} of {group.size}",
        tokens=group.tokens(),
        rewards=rewards if any(map(math.isfinite, rewards)) else (),
        versions=tuple(map(versions_of, responses)) if group.version() is not None else (),
    )


def reward_of(response: Response) -> float:
    """Return the reward of a response; NaN for none. Rewards of tokens, or of several names, are added."""
    reward: Any = response.fields.get("reward")
    parts = list(reward.values()) if isinstance(reward, dict) else [] if reward is None else [reward]
    return sum(float(part.sum() if isinstance(part, Tensor) else part) for part in parts) if parts else math.nan


def versions_of(response: Response) -> str:
    """Return the policy versions of a response: one, or the oldest and the newest."""
    version = response.fields.get("version")
    if not isinstance(version, Tensor):
        return "-" if version is None else str(version)
    if not version.numel():
        return "-"
    low, high = version.aminmax()
    return f"{low}" if low == high else f"{low} to {high}"


def check_groups(root: Path) -> tuple[list[tuple[str, int]], list[tuple[str, str]], tuple[str, ...]]:
    """Read all files of a buffer of groups.

    Returns:
        Name and bytes of the files whose records are whole; name and problem of the others; names of files that do not
        belong to the log, such as those that a repair has put aside.
    """
    good: list[tuple[str, int]] = []
    wrong: list[tuple[str, str]] = []
    for path in log_files(root).values():
        problem = check_file(path)
        if problem:
            wrong.append((path.name, problem))
        else:
            good.append((path.name, path.stat().st_size))
    if not wrong:
        try:
            open_log(root)
            good.append((MANIFEST_NAME, (root / MANIFEST_NAME).stat().st_size))
        except (OstinatoError, OSError) as error:
            wrong.append((MANIFEST_NAME, str(error)))
    other = sorted(path.name for path in root.iterdir() if path.suffix in {".lost", ".tmp"})
    return good, wrong, tuple(other)
