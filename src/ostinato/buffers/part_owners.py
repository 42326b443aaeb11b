"""Which buffer a sampler or writer belongs to: one that keeps a state of the rows of its buffer serves one at a time.

Parts have no reference to their buffer. This module knows the engine of each part, by weak references: a part whose
buffer is gone, or has another part in its place, is free again, and forgets the rows of that buffer.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

from ostinato.errors import OptionError
from ostinato.samplers import Sampler

if TYPE_CHECKING:
    from ostinato.buffers.reader import Reader
    from ostinato.writers import Writer

    Part: TypeAlias = Sampler | Writer

_owners: dict[int, tuple[ref[Part], ref[Reader]]] = {}
"""By the `id` of the part: parts need not be hashable, and those that are equal differ."""


def check_free(part: Part, engine: Reader | None = None) -> None:
    """Check that no other buffer has a part that keeps a state of rows. Nothing changes.

    Args:
        part: a sampler or writer that a buffer is to get.
        engine: that of the buffer; None if it is not made yet.

    Raises:
        OptionError: if another buffer, or a view of one, has it.
    """
    if not part.keeps_rows or _owner(part) in {None, engine}:
        return
    gc.collect()  # the other buffer may be garbage already, in a cycle
    if _owner(part) in {None, engine}:
        return
    name, kind = type(part).__name__, "sampler" if isinstance(part, Sampler) else "writer"
    msg = (
        f"this {name} serves another replay buffer, or a view of one, and would mix up the state of both: make a "
        f"{kind} for each, or pass a callable that does, such as {kind}=partial({name}, ...); or first drop the other "
        f"buffer, or exchange its {kind} (set_{kind})"
    )
    raise OptionError(msg)


def forget_rows(part: Part, engine: Reader | None = None) -> None:
    """Let a free part forget the rows of a buffer that it belonged to earlier, if there was one.

    Args:
        part: see `check_free`, also for the engine.
        engine: a part that it has already forgets nothing.
    """
    if id(part) not in _owners or (engine is not None and _owner(part) is engine):
        return
    del _owners[id(part)]
    if isinstance(part, Sampler):
        part.move()
    else:
        part.clear()


def record_owner(engine: Reader, *parts: Part) -> None:
    """Record that parts belong to the buffer of an engine from now on."""
    for part in parts:
        if part.keeps_rows:
            # the callback calls `pop` with the dead reference as its default
            _owners[id(part)] = (ref(part, partial(_owners.pop, id(part))), ref(engine))


def _owner(part: Part) -> Reader | None:
    """Return the engine that has a part now; None if it is free."""
    entry = _owners.get(id(part))
    engine = None if entry is None else entry[1]()
    return engine if engine is not None and (engine.sampler is part or engine.writer is part) else None
