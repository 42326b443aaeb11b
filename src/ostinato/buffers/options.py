"""Options of buffers: their types and checks, checks of parts and of what these return; helpers for nested data."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import numpy as np
import torch

from ostinato.core import kinds
from ostinato.core.episodes.tracker import Episodes
from ostinato.core.options import LARGEST, check_integer, check_number, check_type
from ostinato.core.records import Picks, as_slots
from ostinato.core.rows import map_leaves
from ostinato.errors import KindError, OptionError, SchemaError, SlotError, UsageError
from ostinato.samplers import Sampler
from ostinato.storages import Storage
from ostinato.writers import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.buffers.remover import RemoverName
    from ostinato.core.records import Run
    from ostinato.storages.base import Checkpointer
    from ostinato.storages.coded import Budget
    from ostinato.units import SampleUnit

Part = TypeVar("Part", Storage, Sampler, Writer)


class BufferOptions(TypedDict, total=False):
    """Keyword arguments of `ReplayBuffer`, for signatures that pass them on."""

    storage: Storage | Callable[[], Storage] | None
    sampler: Sampler | Callable[[], Sampler] | None
    writer: Writer | Callable[[], Writer] | None
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    prefetch: int | None
    transform: Any
    transform_factory: Callable[[], Any] | None
    batch_size: int | None
    dim_extend: int | None
    generator: torch.Generator | None
    shared: bool
    compilable: bool | None
    delayed_init: bool | None
    sample_unit: SampleUnit | Sequence[SampleUnit] | None
    episodes: Episodes | None
    rate_limiter: RateLimiter | None
    version_key: str | tuple[str, ...] | None
    checkpointer: Checkpointer | None
    consume_after_n_samples: int | None
    remover: RemoverName | None
    service_backend: Literal["direct", "ray"]
    service_backend_options: dict[str, Any] | None
    transport: Literal["auto", "direct", "ray", "distributed"]
    transport_options: dict[str, Any] | None


class AnyBufferOptions(BufferOptions, total=False):
    """Keyword arguments of `ReplayBuffer` and of the subclasses that Ostinato has."""

    priority_key: str | tuple[str, ...]
    alpha: float
    beta: float
    eps: float
    dtype: torch.dtype
    sync: bool
    sampler_device: torch.device | str | int | None


def part(name: str, given: Any, base: type[Part], default: Callable[[], Part] | None = None) -> Part:
    """Return the part given, made if it is a class or callable, or the default.

    Raises:
        KindError: if it is not an instance of `base`.
    """
    made = default() if given is None and default is not None else given
    if not isinstance(made, base) and callable(made) and default is not None:
        made = made()
    if not isinstance(made, base):
        msg = (
            f"{name} must be an instance of ostinato.{base.__name__}, or a callable that returns one, got "
            f"{type(made).__name__}"
        )
        raise KindError(msg)
    return made


def positive(name: str, value: Any) -> int:
    """Return an integer of at least 1; see `check_integer`."""
    return check_integer(name, value, 1)


def check_seconds(name: str, value: Any) -> None:
    """Check a finite number of seconds above 0; see `check_number`."""
    check_number(name, value, "a finite number of seconds above 0", lambda seconds: 0 < seconds < math.inf)


def check_generator(generator: Any) -> torch.Generator | None:
    """Return a generator or None; see `check_type`."""
    return check_type("generator", generator, torch.Generator, "make one with torch.Generator().manual_seed(0)")


def check_same_device(generator: torch.Generator, storage: Storage) -> None:
    """Check that draws of a generator are made where the rows are.

    Raises:
        OptionError: if they are on two devices.
    """
    if generator.device.type != storage.device.type:
        msg = f"the generator lives on {generator.device}, the storage on {storage.device}: draws need one device"
        raise OptionError(msg)


def check_episodes(episodes: Any) -> Episodes | None:
    """Return how rows tell where episodes end, or None; see `check_type`."""
    return check_type("episodes", episodes, Episodes, "Episodes(end_key='done')")


def check_pin(pin_memory: bool, storage: Storage) -> bool:  # noqa: FBT001
    """Return whether to gather into page-locked memory.

    Raises:
        OptionError: if that could have no effect.
    """
    if pin_memory and (not torch.accelerator.is_available() or storage.device.type != "cpu"):
        msg = (
            "pin_memory=True needs a storage on the CPU and an accelerator to copy to, got a storage on "
            f"{storage.device} and "
            f"{'an' if torch.accelerator.is_available() else 'no'} accelerator: leave it out"
        )
        raise OptionError(msg)
    return bool(pin_memory)


def check_prefetch(prefetch: Any, batch_size: int | None) -> int:
    """Return how many batches to keep ready; None and 0 are none.

    Raises:
        OptionError: if the batch size is not known in advance.
    """
    if not prefetch:
        return 0
    depth = positive("prefetch", prefetch)
    if batch_size is None:
        msg = (
            "Dynamic batch-size specification is incompatible with multithreaded sampling. When using prefetch, the "
            f"batch-size must be specified in advance: pass batch_size to the constructor, got prefetch={depth} without"
        )
        raise OptionError(msg)
    return depth


def check_service(backend: Any, backend_options: Any, transport: Any, transport_options: Any) -> None:
    """Check that a buffer in this process is asked for: what TorchRL calls the service backend "direct".

    Raises:
        OptionError: for another backend or transport, or options of one.
    """
    if backend != "direct" or transport not in ("auto", "direct") or backend_options or transport_options:
        msg = (
            "a ReplayBuffer is in the process that makes it: service_backend='direct', transport='auto' or 'direct'; "
            "service_backend_options and transport_options are only valid for a remote ReplayBuffer. Got "
            f"{backend!r}, {transport!r}, {backend_options!r} and {transport_options!r}: use RayReplayBuffer, "
            "whose handle has the same methods, or RemoteTensorDictReplayBuffer"
        )
        raise OptionError(msg)


def check_drop_last(sampler: Sampler, batch_size: int | None) -> None:
    """Check that `drop_last` has a batch size.

    Raises:
        OptionError: if it is not known in advance.
    """
    if sampler.drop_last and batch_size is None:
        msg = "Samplers with drop_last=True must work with a predictable batch-size: pass batch_size to the constructor"
        raise OptionError(msg)


def check_size(given: Any, default: int | None, *, fixed: bool) -> int:
    """Return the rows of the next batch.

    Args:
        given: what `sample` got; None takes the default.
        default: the constructor's.
        fixed: batches of the default size are prefetched.

    Raises:
        UsageError: if there is none.
        OptionError: if it is below 1, beyond int64, or differs from what is prefetched.
    """
    if given is None:
        if default is None:
            msg = "batch_size not specified: pass it to the constructor, or to sample()"
            raise UsageError(msg)
        return default
    size = given if type(given) is int and 0 < given < LARGEST else positive("batch_size", given)
    if fixed and size != default:
        msg = (
            f"Got conflicting batch_sizes in constructor ({default}) and `sample` ({size}): batch_size must be "
            f"{default}, for which batches are prefetched; leave it out, or turn prefetch off"
        )
        raise OptionError(msg)
    return size


def warn_of_sampler(sampler: Sampler) -> None:
    """Warn that a sampler has no priorities to update."""
    warnings.warn(
        f"update_priority() has no effect: {type(sampler).__name__} has no priorities; use PrioritizedSampler",
        UserWarning,
        stacklevel=3,
    )


def swap_dims(data: Any, dim: int) -> Any:
    """Bring dimension `dim` of all leaves to the front. View; lists of text are new lists.

    Raises:
        SchemaError: if a leaf has not so many dimensions.
    """
    return _swap(kinds.stack(data, table=True) if type(data) is list else data, dim, ())


def _swap(data: Any, dim: int, path: tuple[Any, ...]) -> Any:
    if kinds.is_text(data, dim + 1):
        return _swap_text(data, path)
    if kinds.is_non_tensor(data) and data.batch_dims <= dim:
        return data  # one object for all rows
    if kinds.is_tensor_collection(data):
        kinds.require_batch(data, dim + 1)
        return data.transpose(0, dim)
    opened = kinds.open_node(data, 0)
    if opened is not None:
        node, children = opened
        swapped = [_swap(child, dim, (*path, key)) for key, child in zip(node.keys, children, strict=True)]
        return kinds.make(node, swapped, (), torch.device("cpu"))
    tensor = kinds.as_tensor(data, path)
    if tensor.ndim <= dim:
        msg = (
            f"dim_extend={dim} needs rows with {dim + 1} batch dimensions, got shape {list(tensor.shape)}: "
            "use add() for one step"
        )
        raise SchemaError(msg)
    return tensor.transpose(0, dim)


def _swap_text(values: Any, path: tuple[Any, ...]) -> Any:
    """Exchange the two dimensions of text: lists of equal length, or an array."""
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return values.swapaxes(0, 1)
    if isinstance(values, (str, bytes, np.ndarray)) or len(set(map(len, values))) > 1:
        msg = f"{kinds.show_field(path)} must hold text for each step and environment, as lists of equal length"
        raise SchemaError(msg)
    return [list(row) for row in zip(*values, strict=True)]


def own(data: Any) -> Any:
    """Copy the tensors of nested data, so that edits do not reach whatever they were views of."""
    return map_leaves(data, lambda x: x.clone() if isinstance(x, torch.Tensor) or kinds.is_tensor_collection(x) else x)


# -- parts of a buffer, and what they return ---------------------------------------------------------------------------


def check_order(writer: Writer) -> None:
    """Check that a writer keeps rows in the order of time.

    Raises:
        OptionError: naming it.
    """
    if not writer.in_order:
        msg = (
            f"{type(writer).__name__} does not keep rows in the order in which they came, so there are no episodes to "
            "draw from: use RoundRobinWriter"
        )
        raise OptionError(msg)


def check_pair(storage: Storage, writer: Writer) -> None:
    """Check that a writer can place rows of the storage's dimensions, in the order that the storage needs.

    Raises:
        OptionError: for a writer of single rows over a storage with `ndim=2`, or over one that needs ring order.
    """
    if storage.ring_only and not writer.in_order:
        raise_for_picks(writer)
    if storage.ndim > 1 and (writer.single_rows or writer.rank_path is not None):
        msg = (
            f"{type(writer).__name__} is not compatible with storages with more than one dimension, since it places "
            f"single rows: got ndim={storage.ndim}, use ndim=1"
        )
        raise OptionError(msg)


def require_tracking(writer: Writer) -> None:
    """Check that samples carry generations by which a row can be recognized later.

    Raises:
        UsageError: if they do not.
    """
    if not writer.tracks_generations:
        msg = (
            "Conditional updates are not supported without generations in samples: the writer must track slot "
            f"generations, got {writer!r}. Use RoundRobinWriter(track_generations=True), or a prioritized sampler"
        )
        raise UsageError(msg)


def raise_for_picks(writer: Writer) -> None:
    """Raise for a writer that picks slots where rows must stay in ring order.

    Raises:
        OptionError: always.
    """
    msg = (
        f"{type(writer).__name__} picks slots, but the storage (single_copy) takes rows in ring order only, where "
        "the row that follows is the next one: use RoundRobinWriter, or leave single_copy out"
    )
    raise OptionError(msg)


def check_budget_parts(budget: Budget, sampler: Sampler, writer: Writer, *, tracked: bool) -> None:
    """Check that the parts of a buffer can follow rows that leave because of a budget of bytes.

    Raises:
        OptionError: naming the part.
    """
    if not writer.in_order:
        msg = f"max_bytes removes the oldest rows, and {type(writer).__name__} keeps no order: use RoundRobinWriter"
        raise OptionError(msg)
    if sampler.counting:
        msg = (
            f"{type(sampler).__name__} counts the draws of each row and cannot be used with max_bytes: use another "
            "sampler, or leave max_bytes out"
        )
        raise OptionError(msg)
    if budget.episodes and not tracked:
        msg = (
            "evict='episodes' removes whole episodes, and this buffer does not know where they end: give it "
            "episodes=Episodes(...), a slice sampler or a sample_unit, or use evict='rows'"
        )
        raise OptionError(msg)


def raise_for_priorities(sampler: Sampler) -> None:
    """Raise for a sampler whose priorities cannot follow rows to other slots.

    Raises:
        OptionError: always.
    """
    msg = (
        f"{type(sampler).__name__} does not say how its priorities follow rows to other slots (move_state): override "
        "that method, or leave max_bytes out"
    )
    raise OptionError(msg)


def check_single(unit: SampleUnit | None, sampler: Sampler) -> None:
    """Check that a unit that makes windows of single rows has no sampler that draws slices.

    Raises:
        OptionError: naming both.
    """
    if unit is not None and unit.single and sampler.slices:
        msg = (
            f"{unit!r} makes windows of single rows, and {type(sampler).__name__} draws slices already: leave one of "
            "them out"
        )
        raise OptionError(msg)


def check_view_parts(main: Sampler, sampler: Sampler) -> None:
    """Check that rows stay for all samplers: those that use rows up have a buffer of their own.

    Args:
        main: the sampler of the buffer.
        sampler: that of a view of it.

    Raises:
        OptionError: naming the sampler that lets rows leave.
    """
    for which, part in (("buffer", main), ("view", sampler)):
        if part.counting:
            msg = (
                f"{type(part).__name__} as the sampler of the {which} uses rows up, which the other samplers of the "
                "buffer would still draw: give it a buffer of its own, without views"
            )
            raise OptionError(msg)


def checked_run(run: Run, given: int) -> Run:
    """Return a writer's run, having checked that it is of the rows given: native code would read beyond them.

    Raises:
        SlotError: naming both numbers.
    """
    if run.rows < 0 or run.skip < 0 or run.skip + run.rows != given:
        msg = f"a writer must place the {given} rows given, got a run that skips {run.skip} and writes {run.rows}"
        raise SlotError(msg)
    return run


def checked_picks(picks: Picks, rows: int, capacity: int, given: int) -> Picks:
    """Check a writer's picks, and convert them to what native code reads, on the CPU.

    Args:
        picks: what the writer chose.
        rows: rows present.
        capacity: slots.
        given: rows that are to be written.

    Raises:
        KindError: if the picks are on the device meta.
        SlotError: if a slot or row is out of range, slots between the rows present and the new ones stay empty, or
            there is not one row for each slot.
    """
    slots, chosen = (as_slots(part, torch.device("cpu")) for part in (picks.slots, picks.rows))
    if chosen.shape != slots.shape or (chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < given):
        msg = (
            f"a writer must choose one of the {given} rows given, in [0, {given}), for each of its {slots.numel()} "
            f"slots, got the rows {chosen[:8].tolist()} ({chosen.numel()} in all)"
        )
        raise SlotError(msg)
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        fresh = int(torch.unique(slots[slots >= rows]).numel())
        if low < 0 or high >= capacity or fresh != max(0, high + 1 - rows):
            msg = (
                f"a writer must choose slots in [0, {capacity}) without leaving gaps after the {rows} rows present, "
                f"got slots from {low} to {high}"
            )
            raise SlotError(msg)
    return Picks(slots, chosen, picks.kept, picks.cursor)


def checked_slots(slots: Tensor, device: torch.device, source: object) -> Tensor:
    """Convert drawn slots to what native code reads, which gets their address.

    Args:
        slots: what a sampler drew, or the records of a unit's plan.
        device: where the rows are.
        source: the sampler or unit.

    Raises:
        KindError: if they are on the device meta, where tensors have no values.
        OptionError: if they are on another device: a copy for each draw would wait for it.
    """
    if slots.device != device and (slots.device.type != device.type or device.index is not None):
        if slots.is_meta:
            return as_slots(slots, device)
        msg = (
            f"{type(source).__name__} gave slots on {slots.device}, the rows are on {device}: make them with "
            "device=view.device"
        )
        raise OptionError(msg)
    if slots.dtype is not torch.int64 or not slots.is_contiguous():
        return as_slots(slots, slots.device)
    return slots
