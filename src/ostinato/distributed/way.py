"""What leads a handle to the shards: their actors, and how to call these. It travels with the handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.distributed.cluster import first_answer, spawn
from ostinato.distributed.counted import Counted
from ostinato.distributed.drawing import Drawer
from ostinato.distributed.fleet import Fleet
from ostinato.distributed.host import ShardHost, ShardRecipe
from ostinato.distributed.sending import Sender
from ostinato.distributed.updates import About

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from ostinato.distributed.turnstile import Turnstile

__all__ = ["Way", "launch"]


class Way(NamedTuple):
    """The way to the shards."""

    actors: list[Any]
    about: About
    patience_s: float
    depth: int
    """Batches to keep ready."""
    sticky: bool
    home: int | None
    """Shard to write to; None takes the place after the handle before."""
    turnstile: Turnstile | None
    directory: Path | None
    """Where checkpoints go."""

    @property
    def waits(self) -> bool:
        """Whether readers and writers wait for each other."""
        return self.about.waits or self.turnstile is not None

    def fleet(self) -> Fleet:
        """Make what calls the shards."""
        turnstile = self.turnstile
        return Fleet(self.actors, self.patience_s, (lambda: None) if turnstile is None else turnstile.look)

    def drawer(self, fleet: Fleet, generator: torch.Generator | None) -> Drawer:
        """Make what draws batches."""
        counted = Counted(fleet, waits=self.waits) if self.about.counting else None
        return Drawer(fleet, generator, self.depth, self.turnstile, counted)

    def sender(self, fleet: Fleet) -> Sender:
        """Make what writes."""
        return Sender(fleet, self.turnstile, waits=self.about.waits, sticky=self.sticky, home=self.home)


def launch(
    plans: Sequence[ShardRecipe], remote_config: Mapping[str, Any] | None, options: Sequence[Mapping[str, Any]]
) -> tuple[list[Any], About]:
    """Start the shards, and wait until all of them stand; errors of their constructors are raised."""
    actors = [
        spawn(ShardHost, remote_config, plan, max_restarts=-1, **mine)
        for plan, mine in zip(plans, options, strict=True)
    ]
    abouts = [first_answer(actor, f"shard {i} of {len(plans)}") for i, actor in enumerate(actors)]
    return actors, About(*(abouts[0][name] for name in About._fields))
