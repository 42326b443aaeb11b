"""A slow model of the episode table: it knows every row ever written, and searches all of them for every answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.records import Run

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor


@dataclass(eq=False)
class Episode:
    """Rows (numbers) of one stream between two ends."""

    rows: list[int] = field(default_factory=list)
    serial: int = 0
    ended: bool = False


@dataclass
class Batch:
    """What is written at once."""

    rows: int
    ends: list[bool] | None = None
    ids: list[int] | None = None
    mask: list[bool] | None = None

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Ends, ids and mask as the table takes them; not contiguous."""

        def strided(values: list[Any] | None, dtype: torch.dtype) -> Tensor | None:
            return None if values is None else torch.tensor(values, dtype=dtype).repeat_interleave(2)[::2]

        return strided(self.ends, torch.bool), strided(self.ids, torch.int64), strided(self.mask, torch.bool)


class Log:
    """Every row ever written, by number."""

    def __init__(self, capacity: int, lanes: int = 1) -> None:
        self.capacity = capacity
        self.lanes = lanes
        self.next_serial = 1
        self.cursor = 0
        self.forget()

    def forget(self) -> None:
        """What `clear` does."""
        self.row_at: dict[int, int] = {}
        self.slots: list[int] = []
        self.episodes: list[Episode | None] = []
        self.going: dict[Hashable, Episode] = {}

    def write(self, batch: Batch, start: int | None = None) -> Run:
        """Write in ring order, and return where the rows went."""
        start = self.cursor if start is None else start
        skip = max(0, batch.rows - self.capacity)
        for i in range(batch.rows):
            slot = (start + i) % self.capacity
            stream = ("id", batch.ids[i]) if batch.ids is not None else ("lane", slot % self.lanes)
            self._write_row(slot, stream, i, batch, stored=i >= skip)
        self.cursor = (start + batch.rows) % self.capacity
        for name, episode in list(self.going.items()):
            if not self.present(episode):
                del self.going[name]
        return Run((start + skip) % self.capacity, batch.rows - skip, self.capacity, skip)

    def _write_row(self, slot: int, stream: Hashable, i: int, batch: Batch, *, stored: bool) -> None:
        number = len(self.slots)
        self.slots.append(slot)
        self.row_at[slot] = number
        if batch.mask is not None and not batch.mask[i]:
            self.episodes.append(None)
            self.going.pop(stream, None)
            return
        episode = self.going.setdefault(stream, Episode())
        self.episodes.append(episode)
        episode.rows.append(number)
        if stored and not episode.serial:
            episode.serial = self.next_serial
            self.next_serial += 1
        if batch.ends is not None and batch.ends[i]:
            episode.ended = True
            del self.going[stream]

    def present(self, episode: Episode) -> list[int]:
        """Slots of the rows of an episode that have not been overwritten."""
        return [self.slots[row] for row in episode.rows if self.row_at.get(self.slots[row]) == row]

    def of(self, slot: int) -> tuple[list[int], int]:
        """Slots of the episode that a slot is in, and its place among them; none: an empty list."""
        episode = self.episodes[self.row_at[slot]] if slot in self.row_at else None
        if episode is None:
            return [], -1
        slots = self.present(episode)
        return slots, slots.index(slot)

    def ended(self, slot: int) -> bool:
        """Whether the row in a slot ended its episode."""
        episode = self.episodes[self.row_at[slot]] if slot in self.row_at else None
        return episode is not None and episode.ended and episode.rows[-1] == self.row_at[slot]

    def spans(self) -> list[tuple[int, int, bool, int]]:
        """First slot, rows present, ended, serial: by the age of the first row."""
        found = {}
        for slot in sorted(self.row_at, key=lambda slot: self.row_at[slot]):
            episode = self.episodes[self.row_at[slot]]
            if episode is not None and id(episode) not in found:
                slots = self.present(episode)
                found[id(episode)] = (slots[0], len(slots), episode.ended, episode.serial)
        return list(found.values())

    def starts(self, need: int) -> dict[int, list[int]]:
        """By first slot of each episode of at least `need` rows: the slots where a window of it may begin."""
        out = {}
        for first, rows, _, _ in self.spans():
            if rows >= need:
                out[first] = self.of(first)[0][: rows - need + 1]
        return out


def clamp_window(slots: Sequence[int], at: int, offsets: Sequence[int]) -> tuple[list[int], list[bool]]:
    """A window over the rows of an episode, clamped to them."""
    wanted = [at + offset for offset in offsets]
    inside = [0 <= w < len(slots) for w in wanted]
    return [slots[min(max(w, 0), len(slots) - 1)] for w in wanted], inside
