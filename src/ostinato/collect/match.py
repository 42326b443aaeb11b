"""Whether a buffer can take the steps of several environments without mixing their episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.buffers import ReplayBuffer
from ostinato.core.kinds import show_path
from ostinato.errors import CapacityError, KindError, OptionError
from ostinato.storages import ListStorage

if TYPE_CHECKING:
    from ostinato.collect.layout import Layout
    from ostinato.core.episodes.keys import Episodes

__all__ = ["Match", "check_arguments", "match"]


class Match(NamedTuple):
    """What rows must say, besides the step itself, so that the buffer can tell episodes apart."""

    env: bool
    """Rows have the field of their environment's number."""
    mask: bool
    """Rows have the field that says whether they are transitions."""


def check_arguments(rb: Any, num_envs: Any) -> None:
    """Refuse what is no buffer, or no number of environments.

    Raises:
        KindError: for another kind of buffer.
        OptionError: for a storage of objects, or a number below 1.
    """
    if not isinstance(rb, ReplayBuffer):
        msg = f"rb must be a ReplayBuffer, got {type(rb).__name__}"
        raise KindError(msg)
    if isinstance(rb.storage, ListStorage):
        msg = "a step is rows of fields, which ListStorage does not take: use LazyTensorStorage or LazyMemmapStorage"
        raise OptionError(msg)
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        msg = f"num_envs must be an integer of at least 1, got {num_envs!r}"
        raise OptionError(msg)


def match(rb: ReplayBuffer, envs: int, mode: str, layout: Layout) -> Match:
    """Return which fields rows need.

    Raises:
        OptionError: if the buffer would draw rows that are no transitions, or mix episodes; it says how to make it.
        CapacityError: if it is too small for the windows of so many environments.
    """
    storage, episodes = rb.storage, rb.episodes
    flat = storage.ndim == 1
    if not flat and storage.laid_out and len(rb) and storage.num_envs != envs:
        msg = f"the storage has {storage.num_envs} environment(s), got num_envs={envs}"
        raise OptionError(msg)
    found = Match(
        env=episodes is not None and episodes.traj_path == layout["env"],
        mask=episodes is not None and episodes.mask_path == layout["mask"],
    )
    if mode == "NEXT_STEP" and not flat and not found.mask:
        msg = (
            "a storage with ndim=2 keeps the row of the step that resets a NEXT_STEP environment, which is no "
            f"transition and must not be drawn: make the buffer with {_advice(layout, None, mask=True)}, or use ndim=1"
        )
        raise OptionError(msg)
    if episodes is None:
        return found
    if flat and envs > 1 and not found.env:
        msg = (
            f"rows of {envs} environments follow each other in a storage with ndim=1, and this buffer would take them "
            f"for one episode: make it with {_advice(layout, 'env', mask=False)} (and name no keys in unit and "
            "sampler), or use ndim=2"
        )
        raise OptionError(msg)
    _check_ends(episodes, layout, found)
    _check_room(rb, envs)
    return found


def _check_ends(episodes: Episodes, layout: Layout, found: Match) -> None:
    """Refuse a buffer that overlooks ends."""
    if episodes.fixed:
        msg = f"{episodes!r} tells the episodes of rows that stay as they are: use keys for rows that are to come"
        raise OptionError(msg)
    ends = set(episodes.resolve(layout.known(env=found.env, mask=found.mask)).end_paths)
    flags = {layout["terminated"], layout["truncated"]}
    if not flags <= ends and layout.paths.get("done") not in ends:
        read = ", ".join(sorted(map(show_path, ends))) or "none"
        msg = (
            f"the buffer must read both flags that end an episode, it reads {read}: make it with "
            f"{_advice(layout, 'env' if found.env else None, mask=found.mask)} (and name no keys in unit and sampler)"
        )
        raise OptionError(msg)


def _check_room(rb: ReplayBuffer, envs: int) -> None:
    """Refuse a capacity that overwrites windows before they are whole."""
    unit, storage = rb.sample_unit, rb.storage
    span = max(rb.sampler.span, 1 if unit is None else unit.span)
    steps = storage.max_size // envs if storage.ndim == 1 else -(-storage.max_size // envs)
    if steps < span:
        msg = (
            f"max_size={storage.max_size} keeps {steps} steps of each of {envs} environment(s), a window takes {span}: "
            f"use max_size >= {span * envs}, or a shorter window"
        )
        raise CapacityError(msg)


def _advice(layout: Layout, env: str | None, *, mask: bool) -> str:
    """Return the `episodes=` argument that would do."""
    usual = layout["terminated"][-1] == "terminated" and layout["truncated"][-1] == "truncated"
    said = [] if env is None else [f"traj_key={_shown(layout, 'env')}"]
    if env is not None or not usual:
        said.append(f"end_key=[{_shown(layout, 'terminated')}, {_shown(layout, 'truncated')}]")
    if mask:
        said.append(f"mask_key={_shown(layout, 'mask')}")
    return f"episodes=Episodes({', '.join(said)})"


def _shown(layout: Layout, part: str) -> str:
    path = layout[part]
    return repr(path[0]) if len(path) == 1 else repr(path)
