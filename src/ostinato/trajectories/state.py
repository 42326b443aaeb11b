"""What a trajectory buffer counts and draws with: ids, seed, generator, format. And how numbers are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
import torch

from ostinato.errors import DamagedFileError
from ostinato.trajectories.listing import Head

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["State", "generator_in", "numbers"]


@final
class State:
    """Shared by a buffer and its shelf; changed under the buffer's lock."""

    __slots__ = ("counter", "format_name", "generator", "seed")

    def __init__(self, seed: int, format_name: str) -> None:
        self.seed = seed
        self.counter = 0
        """The next id."""
        self.format_name = format_name
        self.generator = torch.Generator().manual_seed(seed)

    def head(self) -> Head:
        """Return what stands in front of an index now."""
        return Head(self.format_name, self.counter, self.seed, self.generator.get_state())


def generator_in(head: Head, rank: int, ranks: int, where: object) -> torch.Generator:
    """Return a generator that goes on where the saved one stopped, or begins with the seed where none was saved.

    With several ranks each gets a stream of its own that follows from the saved state and its rank.

    Raises:
        DamagedFileError: The state is not one of a generator.
    """
    generator = torch.Generator().manual_seed(head.seed)
    if head.generator is not None:
        try:
            generator.set_state(head.generator)
        except (RuntimeError, TypeError) as error:
            msg = f"{where} is damaged: the state of the generator: {error}"
            raise DamagedFileError(msg) from error
    if ranks > 1:
        seeds: Tensor = torch.randint(0, 2**62, (rank + 1,), generator=generator, device="cpu")
        generator = torch.Generator().manual_seed(int(seeds[rank]))
    return generator


def numbers(generator: torch.Generator, count: int, below: int, *, replace: bool) -> np.ndarray:
    """Draw `count` of the numbers `[0, below)`, int64 `[count]`.

    With `replace` each draw is uniform and independent; otherwise every ordered choice of different numbers is equally
    likely (`count <= below`).
    """
    if replace:
        return torch.randint(0, below, (count,), generator=generator, device="cpu").numpy()
    if 2 * count > below:
        return torch.randperm(below, generator=generator, device="cpu")[:count].numpy()
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:  # at least half of the numbers are still free: one or two turns
        more = torch.randint(0, below, (2 * (count - len(found)) + 16,), generator=generator, device="cpu").numpy()
        found = np.concatenate((found, more))
        _, first = np.unique(found, return_index=True)
        found = found[np.sort(first)]
    return found[:count]
