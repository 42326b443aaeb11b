"""The groups of a buffer of groups for the viewers and figures: the responses of each, over their tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from ostinato.core.options import number_of
from ostinato.errors import CheckpointError, OstinatoError
from ostinato.groups.buffer import read_group
from ostinato.groups.recovery import open_log
from ostinato.tools.groups import reward_of, versions_of
from ostinato.viz.sources import FieldRoles, OpenTrajectory, TrajectorySource, array_of, name_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ostinato.durable.tensorfile import TreePath
    from ostinato.groups.ledger import GroupEntry
    from ostinato.groups.records import Response

_TOKENS = "tokens"
_PER_TOKEN = ("logprobs", "reward", "mask", "version", _TOKENS)
"""What may be drawn of responses."""
_NAME = 12
"""Most characters of the name of a response in its title."""


@final
class GroupFolder(TrajectorySource):
    """A buffer of groups that no process has open: a group is a trajectory, a token a step, a response an observation.

    Args:
        path: The folder.

    Raises:
        CheckpointError: There are no groups to show.
        DamagedFileError: The log is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        ledger = open_log(Path(path)).ledger
        self._groups: list[GroupEntry] = [group for group in ledger.groups.values() if group.responses]
        if not self._groups:
            msg = f"{path} has no responses: there is nothing to show"
            raise CheckpointError(msg)
        title = f"{name_of(path)}, {number_of(len(self._groups), 'group')} with responses"
        super().__init__("group", [group.number for group in self._groups], title)

    def extent(self, index: int) -> tuple[int, int]:
        """Return the tokens of the longest response, and 1."""
        responses = self._groups[index].responses.values()
        return max(1, *(sum(part.tokens for part in each.parts) for each in responses)), 1

    def returns(self, index: int) -> float | None:
        """Return the mean reward; None if no response has one."""
        try:
            found = np.array([reward_of(each) for each in read_group(self._groups[index]).responses])
        except (OstinatoError, OSError):
            return None
        return float(np.nanmean(found)) if np.isfinite(found).any() else None

    def _read(self, index: int) -> OpenTrajectory:
        entry, steps = self._groups[index], self.extent(index)[0]
        name = f"{self.unit} {entry.id}"
        try:
            group = read_group(entry)
        except (OstinatoError, OSError) as error:
            return OpenTrajectory(name, problem=str(error))
        drawn = _drawn(group.responses)
        shown = dict(zip(_titles(group.responses), group.responses, strict=True))
        titles, half = list(shown), -(-len(shown) // 2)
        roles = FieldRoles(
            current={title: (title,) for title in titles[:half]},
            following={title: (title,) for title in titles[half:]},
            extra={_TOKENS: (_TOKENS,)},
            titles=(f"{drawn} of responses", "further responses"),
        )
        prompt = group.prompt.get("text", group.prompt) if isinstance(group.prompt, dict) else group.prompt
        facts = [("state", entry.state), ("prompt", prompt)]
        facts += [(each.id, each.fields["text"]) for each in group.responses if "text" in each.fields]
        return OpenTrajectory(name, steps, 1, _Responses(shown, drawn, steps), roles, tuple(facts))

    def row_ages(self) -> np.ndarray:
        """Return no ages: groups have no rows."""
        return np.zeros(0, np.int64)

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of the records of groups in each state."""
        found: Counter[str] = Counter()
        for group in self._groups:
            parts = [part.place for each in group.responses.values() for part in each.parts]
            found[f"groups {group.state}"] += group.share + sum(place.nbytes for place in parts if place is not None)
        return dict(found)


def _titles(responses: Sequence[Response]) -> list[str]:
    """Return a title for each response: its name, reward, version and length."""
    names = [each.id if len(each.id) <= _NAME else f"...{each.id[-_NAME:]}" for each in responses]
    names = names if len(set(names)) == len(names) else [each.id for each in responses]
    titles = []
    for name, response in zip(names, responses, strict=True):
        reward = reward_of(response)
        words = [f"reward {reward:.4g}" if np.isfinite(reward) else "no reward"]
        words += [f"version {versions_of(response)}"] if "version" in response.fields else []
        words += [number_of(len(response.fields[_TOKENS]), "token"), *([] if response.done else ["not complete"])]
        titles.append(f"{name}: {', '.join(words)}")
    return titles


def _drawn(responses: Sequence[Response]) -> str:
    """Return the field that is drawn: the first of which all responses have a value for each token."""
    return next(
        name
        for name in _PER_TOKEN
        if all(np.shape(each.fields.get(name, 0)) == (len(each.fields[_TOKENS]),) for each in responses)
    )


@final
class _Responses:
    """A field of the responses of a group as vectors over tokens, NaN behind the end of one, and their tokens."""

    def __init__(self, shown: dict[str, Response], drawn: str, steps: int) -> None:
        self._tokens = [array_of(response.fields[_TOKENS]) for response in shown.values()]
        self._columns: dict[TreePath, np.ndarray] = {}
        for title, response in shown.items():
            values = array_of(response.fields[drawn]).astype(np.float32)
            self._columns[(title,)] = np.pad(values, (0, steps - len(values)), constant_values=np.nan)
        self.shapes: dict[TreePath, tuple[int, ...]] = dict.fromkeys(self._columns, ())

    def row(self, path: TreePath, step: int, env: int) -> np.ndarray:
        """Return the value of one token, or the tokens of all responses."""
        del env
        if path == (_TOKENS,):
            return np.array([tokens[step] for tokens in self._tokens if step < len(tokens)], np.int64)
        return np.asarray(self._columns[path][step])

    def column(self, path: TreePath, env: int) -> np.ndarray:
        """Return the values of all tokens."""
        del env
        return self._columns[path]
