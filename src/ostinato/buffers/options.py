"""Constructor arguments of buffers: their types and checks; helpers for indices and nested data."""

from __future__ import annotations

import math
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import numpy as np
import torch

from ostinato.core import kinds
from ostinato.core.episodes.keys import Episodes
from ostinato.core.rows import map_leaves
from ostinato.errors import KindError, OptionError, SchemaError, UsageError
from ostinato.samplers import Sampler
from ostinato.storages import Storage
from ostinato.writers import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.buffers.remover import RemoverName
    from ostinato.storages.base import Checkpointer
    from ostinato.units import SampleUnit

Part = TypeVar("Part", Storage, Sampler, Writer)
_MOST = 2**63 - 1
"""The largest int64."""


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


def check_seconds(name: str, value: Any) -> None:
    """Check a number of seconds above 0.

    Raises:
        OptionError: if it is not finite, or not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        msg = f"{name} must be a finite number of seconds above 0, got {value!r}"
        raise OptionError(msg)


def positive(name: str, value: Any) -> int:
    """Return an integer of at least 1, within int64.

    Raises:
        KindError: if it is no integer.
        OptionError: if it is smaller or larger.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        msg = f"{name} must be an integer, got {value!r} of type {type(value).__name__}"
        raise KindError(msg)
    number = int(value.__index__())
    if number < 1:
        msg = f"{name} must be at least 1, got {number}"
        raise OptionError(msg)
    if number > _MOST:
        msg = f"{name} must be at most {_MOST}, got {number}"
        raise OptionError(msg)
    return number


def real(name: str, value: Any) -> float:
    """Return a number as a float.

    Raises:
        KindError: if it is no real number.
        OptionError: if it is NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        msg = f"{name} must be a number, got {value!r} of type {type(value).__name__}"
        raise KindError(msg)
    if math.isnan(value):
        msg = f"{name} must be a number, got NaN"
        raise OptionError(msg)
    return float(value)


def check_dim(dim: int, ndim: int) -> int:
    """Return a dimension to extend along; with `ndim=1` it may be 1 for data `[num_envs, rows]` as well.

    Raises:
        OptionError: if it is neither 0 nor 1.
    """
    if dim not in (0, 1) or isinstance(dim, bool):
        msg = f"dim_extend must be a positive value or 0: 0 or 1 (storage.ndim is {ndim}), got {dim!r}"
        raise OptionError(msg)
    return dim


def check_generator(generator: Any) -> torch.Generator | None:
    """Return a generator or None.

    Raises:
        KindError: for anything else.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        msg = (
            f"generator must be a torch.Generator or None, got {type(generator).__name__}: make one with "
            "torch.Generator().manual_seed(0)"
        )
        raise KindError(msg)
    return generator


def check_same_device(generator: torch.Generator, storage: Storage) -> None:
    """Check that draws of a generator are made where the rows are.

    Raises:
        OptionError: if they are on two devices.
    """
    if generator.device.type != storage.device.type:
        msg = f"the generator lives on {generator.device}, the storage on {storage.device}: draws need one device"
        raise OptionError(msg)


def check_episodes(episodes: Any) -> Episodes | None:
    """Return how rows tell where episodes end, or None.

    Raises:
        KindError: for anything else.
    """
    if episodes is not None and not isinstance(episodes, Episodes):
        msg = f"episodes must be an ostinato.Episodes or None, got {type(episodes).__name__}: Episodes(end_key='done')"
        raise KindError(msg)
    return episodes


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
    if backend == "ray":
        msg = (
            "ReplayBuffer(service_backend='ray') is not available: a buffer is in the process that makes it. Use "
            "ostinato.RayReplayBuffer, whose handle has the same methods"
        )
        raise OptionError(msg)
    if backend != "direct":
        msg = f"ReplayBuffer supports service_backend='direct' or 'ray' (as RayReplayBuffer), not {backend!r}"
        raise OptionError(msg)
    if transport not in ("auto", "direct"):
        msg = (
            f"A direct ReplayBuffer only supports transport='auto' or 'direct', got {transport!r}: use RayReplayBuffer "
            "or RemoteTensorDictReplayBuffer for a buffer in another process"
        )
        raise OptionError(msg)
    for name, given in (("service_backend_options", backend_options), ("transport_options", transport_options)):
        if given:
            msg = (
                f"{name} are only valid for a remote ReplayBuffer, got {given!r}: leave them out, or give "
                "RayReplayBuffer its own"
            )
            raise OptionError(msg)


def check_transforms(transform: Any, factory: Any) -> None:
    """Check that there is one transform, or one callable that makes it.

    Raises:
        KindError: if there are both, or the factory is not callable.
    """
    if factory is not None and transform is not None:
        msg = (
            f"transform and transform_factory are mutually exclusive, got transform={transform!r} and "
            f"transform_factory={factory!r}: give one of them"
        )
        raise KindError(msg)
    if factory is not None and not callable(factory):
        msg = f"transform_factory must be a callable without arguments that makes a transform, got {factory!r}"
        raise KindError(msg)


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
    size = given if type(given) is int and 0 < given <= _MOST else positive("batch_size", given)
    if fixed and size != default:
        msg = (
            f"Got conflicting batch_sizes in constructor ({default}) and `sample` ({size}): batch_size must be "
            f"{default}, for which batches are prefetched; leave it out, or turn prefetch off"
        )
        raise OptionError(msg)
    return size


def check_not_shared(*, shared: bool) -> None:
    """Check that `shared` is not asked for.

    Raises:
        OptionError: if it is asked for.
    """
    if shared:
        msg = "shared=True is not available for an ensemble: it serves the threads of one process"
        raise OptionError(msg)


def require_collections(data: Any, who: str) -> None:
    """Check that data is a TensorDict, a tensorclass, or a list of these.

    Raises:
        UsageError: naming the part that takes nothing else.
    """
    if not kinds.holds_collections(data):
        msg = (
            f"{who} expects data to be a tensor collection (TensorDict or tensorclass, or a list of these), got "
            f"{type(data).__name__}"
        )
        raise UsageError(msg)


def warn_of_batch(data: Any, ndim: int) -> None:
    """Warn where `add` gets what looks like several rows."""
    if kinds.is_tensor_collection(data) and data.batch_dims >= ndim:
        warnings.warn(
            f"Using `add()` with a TensorDict that has batch_size={list(data.batch_size)}, which is stored as one row: "
            "use extend() to add its rows",
            UserWarning,
            stacklevel=3,
        )


def warn_of_sampler(sampler: Sampler) -> None:
    """Warn that a sampler has no priorities to update."""
    warnings.warn(
        f"update_priority() has no effect: {type(sampler).__name__} has no priorities; use PrioritizedSampler",
        UserWarning,
        stacklevel=3,
    )


def warn_of_info(include_info: object) -> None:
    """Warn that samples carry their index in any case."""
    warnings.warn(
        f"include_info is going to be deprecated in TorchRL, and include_info={include_info!r} has no effect here: "
        "samples of TensorDict buffers always carry their index; leave it out",
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


def descend(data: Any, path: str | tuple[str, ...]) -> Any:
    """Return a field of nested data by its path."""
    for key in (path,) if isinstance(path, str) else path:
        data = data[key]
    return data


def own(data: Any) -> Any:
    """Copy the tensors of nested data, so that edits do not reach whatever they were views of."""
    return map_leaves(data, lambda x: x.clone() if isinstance(x, torch.Tensor) or kinds.is_tensor_collection(x) else x)


def leaves_by_path(data: Any) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a dict or TensorDict by their paths.

    Raises:
        KindError: for other data.
    """
    if not (isinstance(data, dict) or kinds.is_tensordict(data)):
        msg = f"update_() takes a dict or a TensorDict of stored fields, got {type(data).__name__}"
        raise KindError(msg)
    out: dict[tuple[str, ...], Any] = {}
    for key, value in data.items():
        nested = isinstance(value, dict) or (kinds.is_tensordict(value) and not kinds.is_non_tensor(value))
        out |= {(key, *path): leaf for path, leaf in leaves_by_path(value).items()} if nested else {(key,): value}
    return out


def is_one(index: Any) -> bool:
    """Whether an index chooses one row."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    return hasattr(index, "__index__") and not isinstance(index, bool) and getattr(index, "ndim", 0) == 0
