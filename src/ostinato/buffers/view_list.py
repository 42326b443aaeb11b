"""The views that an engine reports writes to."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ostinato.buffers.views import ViewEngine


@final
class ViewList:
    """The engines of the views of a buffer, in the order in which they were made.

    The references are weak: a view belongs to its handle, and ends with it. The buffer's lock guards the list.
    """

    def __init__(self) -> None:
        self._views: list[weakref.ref[ViewEngine]] = []

    def __len__(self) -> int:
        """Views that were made, without those that `prune` has found to be gone."""
        return len(self._views)

    def add(self, view: ViewEngine) -> None:
        """Report writes to a view from now on."""
        self.prune()
        self._views.append(weakref.ref(view))

    def live(self) -> list[ViewEngine]:
        """Return the views that are in use."""
        return [view for view in (ref() for ref in self._views) if view is not None]

    def prune(self) -> bool:
        """Remove views that are gone, and return whether there were any."""
        kept = [ref for ref in self._views if ref() is not None]
        found = len(kept) < len(self._views)
        self._views = kept
        return found
