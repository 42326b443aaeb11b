"""HDF5 files of nested tensors, through h5py (the extra `h5`). Reading them follows no links and runs no code."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core.kinds import show_path
from ostinato.durable.dtypes import DTYPES, dtype_name
from ostinato.durable.files import damaged
from ostinato.durable.json_codec import decode, encode
from ostinato.durable.ted import collection, leaves_of
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

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
    tensors, values = leaves_of(data)
    for path in (*tensors, *values):
        if len(path) > _MAX_DEPTH:
            msg = f"rows nested more than {_MAX_DEPTH} deep cannot be stored in an HDF5 file"
            raise CheckpointError(msg)
        if any(not key or "/" in key or key in {".", _NOTES} for key in path):
            msg = f"field {show_path(path)} cannot be stored in an HDF5 file under this name"
            raise CheckpointError(msg)
    with h5py.File("checkpoint.h5", "w", driver="core", backing_store=False) as file:
        for path, tensor in tensors.items():
            plain = tensor.detach().cpu().contiguous()
            try:
                array = plain.numpy()
            except TypeError:  # NumPy has no such dtype
                array = plain.view(torch.uint8).numpy()
            file.create_dataset("/".join(path), data=array, **options).attrs["dtype"] = dtype_name(plain.dtype)
        _put_notes(file, {"values": [(list(path), value) for path, value in values.items()], "notes": {}})
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _put_notes(file: Any, said: dict[str, Any]) -> None:
    text = json.dumps(encode(said)).encode()
    file.create_dataset(_NOTES, data=np.frombuffer(text, dtype=np.uint8))


def _get_notes(file: Any) -> dict[str, Any]:
    said: dict[str, Any] = decode(json.loads(np.asarray(file[_NOTES][()]).tobytes()))
    return said


def with_notes(raw: bytes, notes: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file of `write_h5` with other notes."""
    h5py = require("h5py", "h5")
    room = io.BytesIO(raw)
    with h5py.File(room, "r+") as file:
        said = _get_notes(file)
        del file[_NOTES]
        _put_notes(file, {**said, "notes": dict(notes)})
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
            tensors: dict[tuple[str, ...], Tensor] = {}
            _get(h5py, file, (), tensors)
            said = _get_notes(file)
        data = collection(tensors, {tuple(path): value for path, value in said["values"]}, torch.device("cpu"))
        notes: dict[str, Any] = said["notes"]
    except DamagedFileError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        msg = f"this is not an HDF5 file of a checkpoint ({error!r:.200}): it is damaged, or of something else"
        raise DamagedFileError(msg) from error
    return data, notes


def _get(h5py: Any, group: Any, path: tuple[str, ...], tensors: dict[tuple[str, ...], Tensor]) -> None:
    """Read the tensors of a group, and of the groups in it."""
    for name in group:
        here = (*path, name)
        if here == (_NOTES,):
            continue
        if type(group.get(name, getlink=True)) is not h5py.HardLink or len(path) > _MAX_DEPTH:
            damaged("the HDF5 file", f"it has a link at {show_path(here)}, which is not followed")
        item = group[name]
        if isinstance(item, h5py.Group):
            _get(h5py, item, here, tensors)
        else:
            tensors[here] = _tensor(item, here)


def _tensor(item: Any, path: tuple[str, ...]) -> Tensor:
    name = str(item.attrs.get("dtype", ""))
    if name not in DTYPES or item.external or item.is_virtual or item.dtype.kind not in "biufc":
        damaged("the HDF5 file", f"it has other data than rows at {show_path(path)}, {item!r}")
    tensor, dtype = torch.from_numpy(np.ascontiguousarray(item[()])), DTYPES[name]
    if tensor.dtype is dtype:
        return tensor
    if tensor.dtype is not torch.uint8:
        damaged("the HDF5 file", f"it has {show_path(path)} as {tensor.dtype} and {dtype}")
    return tensor.view(dtype)
