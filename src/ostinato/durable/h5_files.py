"""HDF5 files of nested tensors, through h5py (the extra `h5`). Reading them follows no links and runs no code."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core import kinds
from ostinato.core.kinds import Node, show_path
from ostinato.durable.dtypes import DTYPES, dtype_name
from ostinato.durable.json_codec import decode, encode
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["read_h5", "with_notes", "write_h5"]

_NOTES = "_ostinato"
"""Dataset with everything that is no tensor, as JSON."""
_MAX_DEPTH = 100


def write_h5(data: Any, options: Mapping[str, Any]) -> bytes:
    """Return an HDF5 file: TensorDicts as groups, tensors as datasets.

    Args:
        data: a TensorDict of tensors and plain values.
        options: arguments of h5py's `create_dataset`, such as `compression`.

    Raises:
        CheckpointError: if a key or a value has no form in the file.
        MissingExtraError: if h5py is not installed.
    """
    h5py = require("h5py", "h5")
    values: list[tuple[list[str], Any]] = []
    with h5py.File("checkpoint.h5", "w", driver="core", backing_store=False) as file:
        _put(file, data, (), options, values)
        text = json.dumps(encode({"values": values, "notes": {}})).encode()
        file.create_dataset(_NOTES, data=np.frombuffer(text, dtype=np.uint8))
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _put(
    group: Any, data: Any, path: tuple[str, ...], options: Mapping[str, Any], values: list[tuple[list[str], Any]]
) -> None:
    if len(path) > _MAX_DEPTH:
        msg = f"rows nested more than {_MAX_DEPTH} deep cannot be stored in an HDF5 file"
        raise CheckpointError(msg)
    for key, value in data.items():
        here = (*path, str(key))
        if not key or "/" in key or key in {".", _NOTES}:
            msg = f"field {show_path(here)} cannot be stored in an HDF5 file under this name"
            raise CheckpointError(msg)
        if isinstance(value, torch.Tensor):
            array, name = _array(value.detach().cpu())
            group.create_dataset(key, data=array, **options).attrs["dtype"] = name
        elif kinds.is_non_tensor(value) or not kinds.is_tensordict(value):
            values.append((list(here), value.data if kinds.is_tensor_collection(value) else value))
        else:
            _put(group.create_group(key), value, here, options, values)


def _array(tensor: Tensor) -> tuple[np.ndarray[Any, Any], str]:
    """Return a tensor as an array, dtypes that NumPy does not have as bytes, and the name of its dtype."""
    name = dtype_name(tensor.dtype)
    try:
        return tensor.contiguous().numpy(), name
    except TypeError:
        return tensor.contiguous().view(torch.uint8).numpy(), name


def with_notes(raw: bytes, notes: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file of `write_h5` with other notes."""
    h5py = require("h5py", "h5")
    room = io.BytesIO(raw)
    with h5py.File(room, "r+") as file:
        said = decode(json.loads(np.asarray(file[_NOTES][()]).tobytes()))
        del file[_NOTES]
        text = json.dumps(encode({**said, "notes": dict(notes)})).encode()
        file.create_dataset(_NOTES, data=np.frombuffer(text, dtype=np.uint8))
    return room.getvalue()


def read_h5(raw: bytes | memoryview) -> tuple[Any, dict[str, Any]]:
    """Return the data that `write_h5` was given, and the notes of `with_notes`. Tensors are on the CPU. Copy.

    Raises:
        DamagedFileError: if it is no such file, or contains links, external or virtual data, or other values.
        MissingExtraError: if h5py is not installed.
    """
    h5py = require("h5py", "h5")
    try:
        with h5py.File(io.BytesIO(raw), "r") as file:
            data = _get(h5py, file, ())
            text = np.asarray(file[_NOTES][()]).tobytes()
        said = decode(json.loads(text))
        for path, value in said["values"]:
            level = data
            for key in path[:-1]:
                level = level.get(key)
            level.set_non_tensor(path[-1], value)
        notes: dict[str, Any] = said["notes"]
    except DamagedFileError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        msg = f"this is not an HDF5 file of a checkpoint ({error!r:.200}): it is damaged, or of something else"
        raise DamagedFileError(msg) from error
    return data, notes


def _get(h5py: Any, group: Any, path: tuple[str, ...]) -> Any:
    names = [name for name in group if path or name != _NOTES]
    made = []
    for name in names:
        link = group.get(name, getlink=True)
        if type(link) is not h5py.HardLink or len(path) > _MAX_DEPTH:
            msg = f"the HDF5 file has a link at {show_path((*path, name))}, which is not followed: it is damaged"
            raise DamagedFileError(msg)
        item = group[name]
        made.append(_get(h5py, item, (*path, name)) if isinstance(item, h5py.Group) else _tensor(item, (*path, name)))
    return kinds.make(Node("tensordict", tuple(names)), made, (), torch.device("cpu"))


def _tensor(item: Any, path: tuple[str, ...]) -> Tensor:
    name = str(item.attrs.get("dtype", ""))
    if name not in DTYPES or item.external or item.is_virtual or item.dtype.kind not in "biufc":
        msg = f"the HDF5 file has other data than rows at {show_path(path)}, {item!r}: it is damaged"
        raise DamagedFileError(msg)
    tensor, dtype = torch.from_numpy(np.ascontiguousarray(item[()])), DTYPES[name]
    if tensor.dtype is dtype:
        return tensor
    if tensor.dtype is not torch.uint8:
        msg = f"the HDF5 file has {show_path(path)} as {tensor.dtype} and {dtype}: it is damaged"
        raise DamagedFileError(msg)
    return tensor.view(dtype)
