"""What an ensemble is made of: buffers, or parts that are put together into buffers. Checks, no state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.buffers.replay import ReplayBuffer
from ostinato.errors import KindError, OptionError
from ostinato.samplers import SamplerEnsemble
from ostinato.storages import StorageEnsemble
from ostinato.writers import WriterEnsemble

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_buffers", "check_collates", "put_together", "refuse_parts"]


def refuse_parts(*parts: Any) -> None:
    """Refuse parts beside buffers.

    Raises:
        OptionError: if there are any.
    """
    if any(part is not None for part in parts):
        msg = "an ensemble is made of buffers, or else of storages=, samplers= and writers=, not of both: give one"
        raise OptionError(msg)


def check_buffers(rbs: Sequence[Any]) -> None:
    """Refuse members that cannot be mixed.

    Raises:
        KindError: if one is no buffer.
        OptionError: if one is there twice, or storages differ in `ndim`.
    """
    for i, rb in enumerate(rbs):
        if not isinstance(rb, ReplayBuffer):
            msg = f"the members of an ensemble are ReplayBuffers, got {type(rb).__name__} at {i}"
            raise KindError(msg)
    if len({id(rb) for rb in rbs}) < len(rbs):
        msg = "a buffer can be a member only once: give it a larger weight p instead"
        raise OptionError(msg)
    dims = [rb.storage.ndim for rb in rbs]
    if len(set(dims)) > 1:
        msg = f"members must agree in storage.ndim, got {dims}: rows could not be named by one kind of index"
        raise OptionError(msg)


def check_collates(given: Any, members: int) -> list[Any]:
    """Return what collates the rows of each member, None for its own way.

    Raises:
        KindError: if one cannot be called.
        OptionError: if they are not as many as the members.
    """
    if given is None:
        return [None] * members
    if len(given) != members:
        msg = f"collate_fns must hold one entry for each of the {members} members, got {len(given)}"
        raise OptionError(msg)
    for collate in given:
        if collate is not None and not callable(collate):
            msg = f"collate_fns must hold callables or None, got {type(collate).__name__}"
            raise KindError(msg)
    return list(given)


def put_together(
    storages: Any, samplers: Any, writers: Any, given: dict[str, Any]
) -> tuple[tuple[ReplayBuffer, ...], SamplerEnsemble]:
    """Make buffers of parts, the first storage with the first sampler and writer, and so on.

    Raises:
        KindError: if something is no ensemble of parts.
        OptionError: if one is missing, they are not equally many, or `given` says once more how to mix.
    """
    parts = {"storages": storages, "samplers": samplers, "writers": writers}
    bases: dict[str, type] = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for name, part in parts.items():
        if part is None:
            msg = f"an ensemble needs buffers, or all of storages=, samplers= and writers=; {name}= is missing"
            raise OptionError(msg)
        if not isinstance(part, bases[name]):
            msg = f"{name} must be a {bases[name].__name__}, got {type(part).__name__}"
            raise KindError(msg)
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        msg = f"storages, samplers and writers must be equally many, got {counts}"
        raise OptionError(msg)
    twice = [name for name, value in given.items() if value is not None]
    if twice:
        msg = f"with samplers= the SamplerEnsemble says how to mix: give {', '.join(twice)} to it"
        raise OptionError(msg)
    rows = zip(storages, samplers, writers, storages.transforms, strict=True)
    rbs = tuple(ReplayBuffer(storage=a, sampler=b, writer=c, transform=d) for a, b, c, d in rows)
    check_buffers(rbs)
    return rbs, samplers
