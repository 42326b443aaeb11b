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

    from ostinato.durable.tensorfile import TreePath
    from ostinato.groups.ledger import GroupEntry
    from ostinato.groups.records import Response

_TOKENS = "tokens"
_PER_TOKEN = ("logprobs", "reward", "mask", "version", _TOKENS)
"""What is drawn of a response: the first that has a value for each token."""


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
        shown = {_title(each): each for each in group.responses}
        half = -(-len(shown) // 2)
        paths: dict[str, TreePath] = {title: (title,) for title in shown}
        tokens: dict[str, TreePath] = {f"token of {each.id}": (title, _TOKENS) for title, each in shown.items()}
        titles = list(paths)
        roles = FieldRoles(
            current={title: paths[title] for title in titles[:half]},
            following={title: paths[title] for title in titles[half:]},
            extra=tokens,
            titles=("responses", "further responses"),
        )
        prompt = group.prompt.get("text", group.prompt) if isinstance(group.prompt, dict) else group.prompt
        facts = [("state", entry.state), ("prompt", prompt)]
        facts += [(each.id, each.fields["text"]) for each in group.responses if "text" in each.fields]
        return OpenTrajectory(name, steps, 1, _Responses(shown, steps), roles, tuple(facts))

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


def _title(response: Response) -> str:
    reward = reward_of(response)
    words = [f"reward {reward:.4g}" if np.isfinite(reward) else "no reward"]
    words += [f"version {versions_of(response)}"] if "version" in response.fields else []
    words += [number_of(len(response.fields[_TOKENS]), "token"), *([] if response.done else ["not complete"])]
    return f"{response.id}: {', '.join(words)}, {_drawn(response)}"


def _drawn(response: Response) -> str:
    """Return the field that is drawn over the tokens."""
    count = len(response.fields[_TOKENS])
    fields = response.fields
    return next(name for name in _PER_TOKEN if np.shape(fields.get(name, 0)) == (count,))


@final
class _Responses:
    """The responses of a group as vectors over tokens; NaN, or -1 for tokens, behind the end of one."""

    def __init__(self, shown: dict[str, Response], steps: int) -> None:
        self._columns: dict[TreePath, np.ndarray] = {}
        for title, response in shown.items():
            for path, name in (((title,), _drawn(response)), ((title, _TOKENS), _TOKENS)):
                values = array_of(response.fields[name])
                values = values if len(path) > 1 else values.astype(np.float32)
                padding = np.full(steps - len(values), -1 if len(path) > 1 else np.nan, values.dtype)
                self._columns[path] = np.concatenate([values, padding])
        self.shapes: dict[TreePath, tuple[int, ...]] = dict.fromkeys(self._columns, ())

    def row(self, path: TreePath, step: int, env: int) -> np.ndarray:
        """Return the value of one token."""
        del env
        return np.asarray(self._columns[path][step])

    def column(self, path: TreePath, env: int) -> np.ndarray:
        """Return the values of all tokens."""
        del env
        return self._columns[path]
