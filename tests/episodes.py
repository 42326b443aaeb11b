"""A slow log of everything a buffer was told, and what units and slices must make of it, in plain Python.

Rows tell their environment, episode, step and number, and every observation is a function of the first three, so that
any mixing of episodes shows; the log itself is a list that a deque's length limits, scanned from end to end each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostinato import ReplayBuffer

__all__ = ["Log", "Row", "achieved", "batch_of", "goal", "observe", "row_of"]


@dataclass(frozen=True)
class Row:
    """One transition."""

    env: int
    episode: int
    t: int
    id: int
    terminated: bool = False
    truncated: bool = False
    mask: bool = True

    @property
    def done(self) -> bool:
        """Whether it ends its episode."""
        return self.terminated or self.truncated

    @property
    def reward(self) -> float:
        """Differs from row to row; exact in float32."""
        return self.id % 64 + 0.5


def observe(env: int, episode: int, t: int) -> list[float]:
    """The observation before step `t`."""
    return [float(env), float(episode), float(t)]


def achieved(row: Row, after: int = 0) -> float:
    """What was achieved before (or after) the step: tells episode and step, exact in float32."""
    return row.episode * 1024.0 + row.t + after


def goal(row: Row) -> float:
    """The goal stored with a row: none that anybody achieved."""
    return -1.0 - row.id


def batch_of(rows: list[Row], *, flat: bool = False, next_goals: bool = True) -> dict[str, Any]:
    """Return the fields of rows `[n]`: results of the step under `next`, or beside it with `flat`."""

    def column(values: Iterable[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    now = {
        "env": column((row.env for row in rows), torch.int64),
        "episode": column((row.episode for row in rows), torch.int64),
        "t": column((row.t for row in rows), torch.int64),
        "id": column((row.id for row in rows), torch.int64),
        "mask": column((row.mask for row in rows), torch.bool),
        "obs": column((observe(row.env, row.episode, row.t) for row in rows), torch.float32),
        "achieved_goal": column((achieved(row) for row in rows), torch.float32),
        "desired_goal": column((goal(row) for row in rows), torch.float32),
    }
    then = {
        "obs": column((observe(row.env, row.episode, row.t + 1) for row in rows), torch.float32),
        "reward": column((row.reward for row in rows), torch.float32),
        "terminated": column((row.terminated for row in rows), torch.bool),
        "truncated": column((row.truncated for row in rows), torch.bool),
        "done": column((row.done for row in rows), torch.bool),
    }
    if next_goals:
        then["achieved_goal"] = column((achieved(row, 1) for row in rows), torch.float32)
    if not flat:
        return {**now, "next": then}
    beside = {"reward", "terminated", "truncated", "done"}
    return {**now, **{key if key in beside else f"next_{key}": value for key, value in then.items()}}


def row_of(batch: Any, i: int, *, flat: bool = False) -> Row:
    """Return row `i` of a batch."""
    then = batch if flat else batch["next"]
    env, episode, t, number = (int(batch[key][i]) for key in ("env", "episode", "t", "id"))
    ends = bool(then["terminated"][i]), bool(then["truncated"][i])
    return Row(env, episode, t, number, *ends, mask=bool(batch["mask"][i]))


@dataclass
class Log:
    """Environments that are played, and every row of the buffer that they were written to.

    `layout` is "line" (one environment, its rows one after the other), "lanes" (`ndim=2`) or "mixed" (rows of several
    environments in any order, told apart by the field `stream`).
    """

    capacity: int
    layout: str = "line"
    envs: int = 1
    longest: int = 6
    seed: int = 0
    masked: float = 0.0
    rows: list[Row] = field(default_factory=list)
    tagged: bool = True
    """Whether the ends stored are those of the environments: not after flags were edited."""
    written: int = 0

    def __post_init__(self) -> None:
        """Start the environments."""
        self._random = random.Random(self.seed)
        self._episodes = 0
        self._places = [self._start() for _ in range(self.envs)]

    def _start(self) -> list[int]:
        self._episodes += 1
        return [self._episodes, 0, self._random.randint(1, self.longest)]

    @property
    def lanes(self) -> int:
        """Environments side by side."""
        return self.envs if self.layout == "lanes" else 1

    # -- playing ------------------------------------------------------------------------------------------------------

    def step(self, env: int) -> Row:
        """Play a step."""
        episode, t, length = self._places[env]
        terminated = t + 1 == length and self._random.random() < 0.5
        truncated = t + 1 == length and not terminated
        masked = self._random.random() < self.masked
        row = Row(env, episode, t, self.written, terminated, truncated, not masked)
        self.written += 1
        self._places[env] = self._start() if t + 1 == length or masked else [episode, t + 1, length]
        return row

    def play(self, steps: int) -> list[Row]:
        """Play `steps` rows (with lanes, steps of all lanes), and write them down."""
        if self.layout == "lanes":
            new = [self.step(env) for _ in range(steps) for env in range(self.envs)]
        elif self.layout == "mixed":
            new = [self.step(self._random.randrange(self.envs)) for _ in range(steps)]
        else:
            new = [self.step(0) for _ in range(steps)]
        self.rows.extend(new)
        return new

    def extend(self, rb: ReplayBuffer, steps: int, **form: bool) -> Tensor:
        """Play and write rows with `extend`."""
        data = batch_of(self.play(steps), **form)
        if self.layout == "lanes":
            data = _map(data, lambda x: x.view(steps, self.envs, *x.shape[1:]).transpose(0, 1))
        return rb.extend(data)

    def add(self, rb: ReplayBuffer, **form: bool) -> None:
        """Play and write one row (with lanes, one step) with `add`."""
        data = batch_of(self.play(1), **form)
        rb.add(data if self.layout == "lanes" else _map(data, lambda x: x[0]))

    def empty(self, rb: ReplayBuffer) -> None:
        """Forget all rows."""
        rb.empty()
        self.rows = []
        self.tagged = True

    def resize(self, steps: int) -> None:
        """Go on in another ring, with the oldest row in slot 0: by so many steps larger, or as small as rows allow.

        In a ring of the same capacity all rows keep their slots.
        """
        kept = list(self.present().values())
        capacity = self.capacity + steps * self.lanes if steps else max(6 * self.lanes, len(kept))
        if capacity != self.capacity:
            self.rows, self.capacity = kept, capacity

    def edit(self, rb: ReplayBuffer, *, flags: bool, masks: bool = False, **form: bool) -> None:
        """Replace some rows in place; with `flags` some begin or cease to end their episode, `masks` likewise."""
        present = self.present()
        chosen = self._random.sample(sorted(present), min(3, len(present)))
        for slot in chosen:
            new = replace(present[slot], id=self.written)
            if flags:
                new = replace(new, terminated=not new.done, truncated=False)
            if masks:
                new = replace(new, mask=not new.mask)
            self.written += 1
            self._replace(slot, new)
            index: Any = (slot % self.lanes, slot // self.lanes) if self.layout == "lanes" else slot
            rb[index] = _map(batch_of([new], **form), lambda x: x[0])
        self.tagged = self.tagged and not flags and not masks

    def _replace(self, slot: int, row: Row) -> None:
        at = max(i for i in range(len(self.rows)) if i % self.capacity == slot)
        self.rows[at] = row

    # -- what must be ------------------------------------------------------------------------------------------------

    def present(self) -> dict[int, Row]:
        """Return the row of each slot, the oldest one first."""
        first = max(0, len(self.rows) - self.capacity)
        return {i % self.capacity: self.rows[i] for i in range(first, len(self.rows))}

    def stream(self, slot: int, row: Row) -> int:
        """What rows that follow each other have in common."""
        return row.env if self.layout == "mixed" else slot % self.lanes

    def episodes(self) -> list[tuple[list[int], bool]]:
        """Return the slots of each episode present and whether it has ended; that with the oldest row first."""
        found: list[tuple[list[int], bool]] = []
        running: dict[int, int] = {}
        for slot, row in self.present().items():
            stream = self.stream(slot, row)
            if not row.mask:
                running.pop(stream, None)
                continue
            if stream not in running:
                running[stream] = len(found)
                found.append(([], False))
            number = running[stream]
            found[number][0].append(slot)
            if row.done:
                found[number] = (found[number][0], True)
                del running[stream]
        return found

    def places(self) -> dict[int, tuple[list[int], int]]:
        """Return the episode of each slot, as its slots, and the place in it."""
        return {slot: (slots, at) for slots, _ in self.episodes() for at, slot in enumerate(slots)}

    def check_tags(self) -> None:
        """The log agrees with what the environments said: one (env, episode) each, steps in order."""
        if not self.tagged:
            return
        present = self.present()
        for slots, _ in self.episodes():
            rows = [present[slot] for slot in slots]
            assert len({(row.env, row.episode) for row in rows}) == 1
            assert [row.t for row in rows] == list(range(rows[0].t, rows[0].t + len(rows)))

    def slots_of(self, index: Any) -> list[int]:
        """Return the slots of an index as samples give it."""
        if isinstance(index, tuple):
            return [int(step) * self.lanes + int(lane) for step, lane in zip(*index, strict=True)]
        return [int(slot) for slot in index]


def _map(data: Any, change: Any) -> Any:
    return {key: _map(value, change) if isinstance(value, dict) else change(value) for key, value in data.items()}
