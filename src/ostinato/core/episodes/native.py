"""The compiled episode table with tensors in place of addresses.

What lives here: memory for results, and the compiled part's errors in the words of this package. What does not: checks
of dtypes and shapes, and the documentation of what each call means; both are in `core/episodes/table.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from ostinato.core.records import check_slots

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato._native import Episodes

__all__ = ["NativeEpisodes"]

_MOST_TEMPLATES = 16
_MOST_ENTRIES = 16_384  # what takes longer to fill gains nothing from a template


@final
class NativeEpisodes:
    """Episode and position of every slot. Arguments are contiguous CPU tensors that were checked before."""

    def __init__(self, table: Episodes) -> None:
        self._table = table
        self._templates: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    @property
    def cursor(self) -> int:
        """Slot after the newest row."""
        return self._table.cursor

    @property
    def present(self) -> int:
        """Rows present, those of no episode included."""
        return self._table.present

    @property
    def rows(self) -> int:
        """Rows of episodes."""
        return self._table.rows

    @property
    def serial(self) -> int:
        """Episodes that ever began."""
        return self._table.serial

    @property
    def count(self) -> int:
        """Episodes with rows present."""
        return self._table.count

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._table.nbytes

    def note(
        self, start: int, rows: int, skip: int, ends: Tensor | None, ids: Tensor | None, mask: Tensor | None
    ) -> None:
        """Note rows of a ring write."""
        self._table.note(
            start,
            rows,
            skip,
            0 if ends is None else ends.data_ptr(),
            0 if ids is None else ids.data_ptr(),
            0 if mask is None else mask.data_ptr(),
        )

    def clear(self) -> None:
        """Forget all rows; serial numbers and registered needs stay."""
        self._table.clear()

    def ahead(self, slots: Tensor) -> Tensor:
        """Rows that follow each one."""
        out = torch.empty_like(slots)
        try:
            self._table.ahead(slots.data_ptr(), slots.numel(), out.data_ptr())
        except IndexError:
            check_slots(slots, self._table.capacity)
            raise
        return out

    def behind(self, slots: Tensor) -> Tensor:
        """Rows present before each one."""
        out = torch.empty_like(slots)
        try:
            self._table.behind(slots.data_ptr(), slots.numel(), out.data_ptr())
        except IndexError:
            check_slots(slots, self._table.capacity)
            raise
        return out

    def ended(self, slots: Tensor) -> Tensor:
        """Whether each row was written with an end flag."""
        out = torch.empty_like(slots, dtype=torch.bool)
        try:
            self._table.ended(slots.data_ptr(), slots.numel(), out.data_ptr())
        except IndexError:
            check_slots(slots, self._table.capacity)
            raise
        return out

    def shift(self, slots: Tensor, steps: Tensor) -> Tensor:
        """Slots that lie `steps[i]` on."""
        out = torch.empty_like(slots)
        try:
            self._table.shift(slots.data_ptr(), steps.data_ptr(), slots.numel(), out.data_ptr())
        except IndexError:
            check_slots(slots, self._table.capacity)
            raise
        return out

    def window(self, slots: Tensor, before: int, after: int, dilation: int) -> tuple[Tensor, Tensor]:
        """Slots around each one, and whether they are in the episode."""
        n = slots.numel()
        like, like_valid = self._templates.get((n, before, after)) or self._template((n, before, after))
        out, valid = torch.empty_like(like), torch.empty_like(like_valid)
        try:
            self._table.window(slots.data_ptr(), n, before, after, dilation, out.data_ptr(), valid.data_ptr())
        except IndexError:
            check_slots(slots, self._table.capacity)
            raise
        return out, valid

    def _template(self, key: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Tensors `[n, T]` to make others like: twice as fast as to spell shape and dtype out each time."""
        n, before, after = key
        slots = torch.empty((n, before + 1 + after), dtype=torch.int64, device="cpu")
        found = (slots, torch.empty_like(slots, dtype=torch.bool))
        if slots.numel() <= _MOST_ENTRIES:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            self._templates[key] = found
        return found

    def spans(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First slots, rows, whether ended, serials."""
        first = torch.empty(self._table.count, dtype=torch.int64, device="cpu")
        rows, closed, serial = (
            torch.empty_like(first),
            torch.empty_like(first, dtype=torch.bool),
            torch.empty_like(first),
        )
        self._table.spans(first.data_ptr(), rows.data_ptr(), closed.data_ptr(), serial.data_ptr())
        return first, rows, closed, serial

    def register(self, need: int) -> int:
        """Return the number by which the draws for `need` are called."""
        return self._table.add_need(need)

    def start_rows(self, handle: int) -> int:
        """Rows that can start a window."""
        return self._table.start_rows(handle)

    def start_episodes(self, handle: int) -> int:
        """Episodes with such a row."""
        return self._table.start_episodes(handle)

    def draw(self, handle: int, randoms: Tensor) -> Tensor:
        """Such rows by their ranks."""
        out = torch.empty_like(randoms)
        self._table.draw(handle, randoms.data_ptr(), randoms.numel(), out.data_ptr())
        return out

    def draw_episodes(self, handle: int, randoms: Tensor) -> Tensor:
        """Episodes by their ranks, then rows of them."""
        n = randoms.numel() // 2
        out = randoms.new_empty(n)
        self._table.draw_episodes(handle, randoms.data_ptr(), n, out.data_ptr())
        return out

    def save(self) -> dict[str, Tensor]:
        """Records of the rows present, what is known of each besides its rows, free records."""
        table = self._table
        serials = torch.empty(table.records, dtype=torch.int64, device="cpu")
        state = {
            "episode": torch.empty(table.present, dtype=torch.int32, device="cpu"),
            "serials": serials,
            "keys": torch.empty_like(serials),
            "kinds": torch.empty_like(serials, dtype=torch.uint8),
            "status": torch.empty_like(serials, dtype=torch.uint8),
            "free": torch.empty(table.free_count, dtype=torch.int64, device="cpu"),
        }
        table.save(*(x.data_ptr() for x in state.values()))
        return state

    def load(self, cursor: int, serial: int, state: dict[str, Tensor]) -> None:
        """Take a checked state over; registered needs stay."""
        names = ("episode", "serials", "keys", "kinds", "status", "free")
        present, records, free = (state[name].numel() for name in ("episode", "serials", "free"))
        self._table.load(cursor, serial, present, records, free, *(state[name].data_ptr() for name in names))
