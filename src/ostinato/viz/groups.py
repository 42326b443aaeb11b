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

    from torch import Tensor

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
        tokens = [array_of(response.fields[_TOKENS]) for response in group.responses]
        columns: dict[TreePath, np.ndarray] = {
            (title,): _padded(response.fields[drawn], steps) for title, response in shown.items()
        }

        def read(path: TreePath, at: np.ndarray, env: int) -> np.ndarray:
            del env
            return _tokens_at(tokens, at) if path == (_TOKENS,) else columns[path][at]

        return OpenTrajectory(name, steps, 1, dict.fromkeys(columns, ()), read, roles, tuple(facts))

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


def _padded(values: Tensor, steps: int) -> np.ndarray:
    """Return the values of a response as float32 `[steps]`, NaN behind its end."""
    found = array_of(values).astype(np.float32)
    return np.pad(found, (0, steps - len(found)), constant_values=np.nan)


def _tokens_at(tokens: Sequence[np.ndarray], steps: np.ndarray) -> np.ndarray:
    """Return the tokens of the responses that go so far, int64 `[n, responses]`; -1 where fewer do than elsewhere."""
    found = [[values[step] for values in tokens if step < len(values)] for step in steps]
    most = max(map(len, found))
    return np.array([[*row, *[-1] * (most - len(row))] for row in found], np.int64)
