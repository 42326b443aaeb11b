"""What leads a handle to the shards: their actors, and how to call these. It travels with the handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.buffers.options import check_seconds
from ostinato.distributed.ahead import Ahead
from ostinato.distributed.cluster import first_answer, spawn
from ostinato.distributed.counted import Counted
from ostinato.distributed.drawing import Drawer
from ostinato.distributed.fleet import Fleet
from ostinato.distributed.host import ShardHost, ShardRecipe
from ostinato.distributed.sending import Sender
from ostinato.distributed.updates import About
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from ostinato.distributed.placement import Placed
    from ostinato.distributed.turnstile import Turnstile

__all__ = ["Way", "check_options", "launch"]

_ROUTES = ("round_robin", "sticky")


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
    placed: Placed

    @property
    def waits(self) -> bool:
        """Whether readers and writers wait for each other."""
        return self.about.waits or self.turnstile is not None

    def fleet(self) -> Fleet:
        """Make what calls the shards."""
        turnstile = self.turnstile
        return Fleet(self.actors, self.patience_s, (lambda: None) if turnstile is None else turnstile.look)

    def batches(self, fleet: Fleet, generator: torch.Generator | None) -> Ahead:
        """Make what draws batches."""
        counted = Counted(fleet, waits=self.waits) if self.about.counting else None
        return Ahead(Drawer(fleet, generator, self.turnstile, counted), self.depth)

    def sender(self, fleet: Fleet) -> Sender:
        """Make what writes."""
        return Sender(fleet, self.turnstile, waits=self.about.waits, sticky=self.sticky, home=self.home)


def check_options(
    route: str, patience_s: float, checkpoint_dir: Any, checkpoint_every_s: float | None, *, resume: bool
) -> None:
    """Refuse options of a sharded buffer that are none, or exclude each other.

    Raises:
        OptionError: naming them.
    """
    if route not in _ROUTES:
        msg = f"route must be one of {list(_ROUTES)}, got {route!r}"
        raise OptionError(msg)
    if checkpoint_dir is None and (checkpoint_every_s is not None or resume):
        msg = "checkpoint_every_s and resume need checkpoint_dir: where shards are saved"
        raise OptionError(msg)
    check_seconds("patience_s", patience_s)
    if checkpoint_every_s is not None:
        check_seconds("checkpoint_every_s", checkpoint_every_s)


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
