"""A device of its own on a machine without one: tensors that are not on the CPU, and say when the host waits.

The device is called `fakegpu`. Its tensors hold real values, in host memory that ordinary code cannot reach: each
operator runs on a CPU tensor inside. As on a GPU,

- an operator on tensors of both devices raises (0-dimensional CPU tensors may be operands),
- `data_ptr()` is no address that the host may read,
- a copy to the host that is not waited for leaves other values there until something waits for the device,
- what needs a value on the host, and a blocking copy between the devices, is recorded; inside `no_wait` it raises.

Registering a device is for good and for the whole process (`torch.accelerator` sees it): import this module in a
process of its own only, see `test_device.py`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["DEVICE", "DeviceTensor", "HostWaitError", "MixedDevicesError", "no_wait", "waits"]

_setup_privateuseone_for_python_backend("fakegpu")

DEVICE = torch.device("fakegpu", 0)
_CPU = torch.device("cpu")
_WRONG_GENERATOR = "Expected a 'fakegpu' device type for generator but found 'cpu'"
_FAR = 1 << 60  # added to addresses: whoever reads there ends the process, as with the address of a GPU

aten = torch.ops.aten


class HostWaitError(RuntimeError):
    """The host would have waited for the device."""


class MixedDevicesError(RuntimeError):
    """Tensors of both devices met in one operator."""


class _Watch:
    """What is recorded, or raised, when the host waits."""

    forbidden = 0
    seen: ClassVar[list[list[str]]] = []


@contextlib.contextmanager
def no_wait() -> Iterator[None]:
    """Make any wait of the host for the device an error, in all threads."""
    _Watch.forbidden += 1
    try:
        yield
    finally:
        _Watch.forbidden -= 1


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Record the operators for which the host waited."""
    seen: list[str] = []
    _Watch.seen.append(seen)
    try:
        yield seen
    finally:
        _Watch.seen.remove(seen)


def _wait(name: str) -> None:
    for seen in _Watch.seen:
        seen.append(name)
    if _Watch.forbidden:
        msg = f"{name} makes the host wait for the device"
        raise HostWaitError(msg)
    while _UNFINISHED:
        dest, values = _UNFINISHED.pop()
        dest.copy_(values)


class DeviceTensor(torch.Tensor):
    """A tensor on `fakegpu`."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Self], inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.held = inner
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        del inner

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DeviceTensor, (self.cpu(),)

    def __deepcopy__(self, memo: Any) -> Any:
        return DeviceTensor(self.held.clone())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr() + _FAR if self.numel() else 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


_VALUES = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten._unique.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.bincount.default,
    aten.multinomial.default,
}
"""Operators that need values on the host, for their result or its shape."""

_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_COPIES = {aten._to_copy.default, aten.copy_.default}


def _check_wait(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Record that the host waits, if it does."""
    needs = func in _VALUES
    if func is aten.repeat_interleave.Tensor:
        needs = kwargs.get("output_size") is None
    elif func in _INDEXING:
        masked = [x for x in args[1] if x is not None and x.dtype in {torch.bool, torch.uint8}]
        filled = func is not aten.index.Tensor and args[2].numel() == 1  # becomes masked_fill_
        needs = bool(masked) and not filled
        needs = needs or any(x is not None and not isinstance(x, DeviceTensor) for x in args[1])  # copied there
    if needs:
        _wait(str(func))


def _check_devices(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise if tensors of both devices meet."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if func in _INDEXING and isinstance(args[0], DeviceTensor):
        tensors = [args[0], *args[2:3]]  # indices may lie on the CPU
    near = [x for x in tensors if not isinstance(x, DeviceTensor) and x.ndim]
    if near and len(near) < len(tensors):
        msg = f"Expected all tensors to be on the same device, but {func} found fakegpu:0 and cpu"
        raise MixedDevicesError(msg)


_UNFINISHED: list[tuple[torch.Tensor, torch.Tensor]] = []


def _synchronize(*_: Any) -> None:
    """Wait for the device: copies to the host that were not waited for are complete now."""
    _wait("synchronize")


def _to_host(dest: torch.Tensor, source: torch.Tensor, name: str, *, blocking: bool) -> torch.Tensor:
    """Copy to the host; without waiting its memory holds other values until something does."""
    if blocking:
        _wait(name)
        return dest.copy_(source)
    _UNFINISHED.append((dest, source.clone()))
    return dest.copy_(torch.full_like(source, 77))


def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy on the device, or between the devices."""
    if func is aten.copy_.default:
        dest, source = args[:2]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        across = dest.device.type != source.device.type and dest.numel() > 0
        if across and dest.is_cpu:
            return _to_host(dest, _inner(source), str(func), blocking=blocking)
        if across and blocking:
            _wait(str(func))
        _inner(dest).copy_(_inner(source))
        return dest
    (source,) = args
    device = kwargs.get("device")
    device = source.device if device is None else torch.device(device)
    blocking = not kwargs.get("non_blocking")
    if device.type != source.device.type and source.numel():
        if device.type == "cpu":
            dtype = kwargs.get("dtype") or source.dtype
            here = torch.empty(source.shape, dtype=dtype, device=_CPU)
            return _to_host(here, _inner(source).to(dtype), str(func), blocking=blocking)
        if blocking:
            _wait(str(func))
    made = func(_inner(source), **{**kwargs, "device": _CPU})
    made = made.clone() if made is _inner(source) else made
    return made if device.type == "cpu" else DeviceTensor(made)


def _inner(x: Any) -> Any:
    return x.held if isinstance(x, DeviceTensor) else x


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the tensors inside; results that are arguments (in place, out=) are given back as they are."""
    if func in _COPIES:
        return _copy(func, args, kwargs)
    if getattr(kwargs.get("generator"), "device", None) == _CPU:
        raise RuntimeError(_WRONG_GENERATOR)
    _check_devices(func, args, kwargs)
    _check_wait(func, args, kwargs)
    if func is aten._pin_memory.default:
        msg = "cannot pin memory of fakegpu, only dense CPU tensors can be pinned"
        raise RuntimeError(msg)
    device = kwargs.get("device")
    far = device is None or torch.device(device).type == DEVICE.type
    given = {id(x.held): x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)}
    if device is not None:
        kwargs = {**kwargs, "device": _CPU}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not far:
            return x
        known = given.get(id(x))
        if known is None:
            return DeviceTensor(x)
        if known.shape != x.shape or known.stride() != x.stride():
            msg = f"{func} has changed the shape of a tensor in place, which fakegpu cannot follow"
            raise NotImplementedError(msg)
        return known

    return tree_map(wrap, out)


# -- what makes tensors without having one --------------------------------------------------------------------------


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return DeviceTensor(torch.empty(size, dtype=dtype, device=_CPU))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device=_CPU))


def _made(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory whose general form would let an operator give an empty tensor its shape."""

    def on_device(*args: Any, dtype: Any = None, generator: Any = None, **_: Any) -> torch.Tensor:
        if generator is not None or any(isinstance(x, torch.Generator) for x in args):
            raise RuntimeError(_WRONG_GENERATOR)
        return DeviceTensor(make(*args, dtype=dtype, device=_CPU))

    return on_device


def _copy_from(source: torch.Tensor, dest: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not non_blocking and dest.numel():
        _wait("aten::_copy_from")
    _inner(dest).copy_(_inner(source))
    return dest


_LIBRARY = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
for _name, _kernel in {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "arange": _made(torch.arange),
    "arange.start": _made(torch.arange),
    "arange.start_step": _made(torch.arange),
    "randperm": _made(torch.randperm),
    "randperm.generator": _made(lambda n, _=None, **options: torch.randperm(n, **options)),
    "_copy_from": _copy_from,
}.items():
    _LIBRARY.impl(_name, _kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
torch.get_device_module("fakegpu").synchronize = _synchronize  # TensorDict.to calls it
