"""The files of a TorchRL checkpoint: JSON and raw arrays. Executes nothing and follows no links."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.kinds import Node
from ostinato.durable import files
from ostinato.durable.arrays import DTYPES, check_shape, shape_nbytes
from ostinato.durable.files import file_size, join_parts, read_small
from ostinato.durable.manifest import parse_json
from ostinato.errors import CheckpointError, OstinatoError

_MAX_JSON_BYTES = 16 * 2**20
_MAX_DEPTH = 64
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_NAME = re.compile(r"(?!\.\.?$)[^/\\\0]{1,250}", re.DOTALL)
"""Names that cannot lead out of a directory."""
_PLAIN = (bool, int, float, str, list, type(None))


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory has the files of TorchRL's `rb.dumps`; their contents are not read.

    Examples:
        >>> is_checkpoint(".")
        False
    """
    root = Path(path)
    return (root / "storage" / "storage_metadata.json").is_file() and (root / "buffer_metadata.json").is_file()


@final
@dataclass(frozen=True)
class Folder:
    """An untrusted directory. Below its root no symbolic link is followed.

    Attributes:
        root: The directory.
        read: Files that were opened, relative to the root.
        notes: What was found and cannot be imported.
    """

    root: Path
    read: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Return whether a path exists."""
        return os.path.lexists(self.root.joinpath(*names))

    def json(self, *names: str) -> dict[str, Any]:
        """Read a JSON object.

        Raises:
            DamagedFileError: The file is missing, too long, or not a JSON object.
        """
        path = self._path(names)
        found = parse_json(read_small(path, _MAX_JSON_BYTES), path)
        if not isinstance(found, dict):
            damaged(path, "it is not a JSON object")
        return found

    def array(self, entry: Any, *names: str) -> Tensor:
        """Map an array copy-on-write. The size of its file must match its dtype and shape.

        Args:
            entry: The metadata: `dtype`, such as `torch.float32`, and `shape`.
            names: The path of the file, relative to the root.

        Raises:
            DamagedFileError: The metadata or the file is invalid.
        """
        path = self._path(names)
        named = entry.get("dtype") if isinstance(entry, dict) else None
        dtype = DTYPES.get(named.removeprefix("torch.")) if isinstance(named, str) else None
        shape = check_shape(entry.get("shape")) if dtype is not None else None
        if dtype is None or shape is None or entry.get("is_nested", False) is not False:
            damaged(path, f"its metadata must have a dtype and a shape and not be nested, got {str(entry)[:200]}")
        return _map_file(path, dtype, shape)

    def tensordict(self, *names: str) -> Any:
        """Read a memory-mapped TensorDict; its arrays are mapped, not read.

        Raises:
            CheckpointError: It has values other than TensorDicts, tensors and plain values.
            DamagedFileError: A file is missing or damaged.
        """
        return self._level(names, 0)

    def _level(self, names: tuple[str, ...], depth: int) -> Any:
        path = self.root.joinpath(*names) / "meta.json"
        meta = self.json(*names, "meta.json")
        kind, batch = meta.get("_type"), check_shape(meta.get("shape"))
        if kind != _TENSORDICT:
            msg = (
                f"{path} describes {str(kind)[:200]}, only TensorDicts are read (convert a tensorclass: load it with "
                "TorchRL and save `data.to_tensordict()`)"
            )
            raise CheckpointError(msg)
        if batch is None or depth > _MAX_DEPTH:
            damaged(path, "it must have a batch size and at most 64 levels")
        tensors: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for key, entry in meta.items():
            if not isinstance(entry, dict):
                if key not in {"shape", "device", "_type"}:
                    damaged(path, f"invalid entry {key[:80]!r}")
            elif entry.get("type") in ("NonTensorData", "NonTensorStack"):
                others[key] = self._other(entry["type"], batch, *names, key)
            else:
                nested = "type" in entry
                value = self._level((*names, key), depth + 1) if nested else self.array(entry, *names, f"{key}.memmap")
                if (nested and entry["type"] != "TensorDict") or tuple(value.shape[: len(batch)]) != batch:
                    damaged(path, f"invalid entry {key[:80]!r}: {list(value.shape)} in a batch of {list(batch)}")
                tensors[key] = value
        node = Node("tensordict", tuple(tensors), None, batch)
        made = kinds.make(node, list(tensors.values()), (), torch.device("cpu"))
        for key, value in others.items():
            if kinds.is_tensor_collection(value):
                made.set(key, value)
            else:
                made.set_non_tensor(key, value)
        return made

    def _other(self, kind: str, batch: tuple[int, ...], *names: str) -> Any:
        """Read a value that is not a tensor, or one value per row, if it was written as JSON."""
        path, meta = self.root.joinpath(*names), self.json(*names, "meta.json")
        value = meta.get("data", NotImplemented)
        if not isinstance(value, _PLAIN):
            msg = f"{path} holds a value that is neither a tensor nor JSON: it is not read, since unpickling runs code"
            raise CheckpointError(msg)
        if kind == "NonTensorData":
            return value
        try:
            found = kinds.as_objects(value if meta.get("stack_dim") == 0 else None, names, batch)
        except OstinatoError:
            problem = f"it must hold one value for each of {list(batch)} rows, stacked along dimension 0"
            damaged(path / "meta.json", problem)
        return kinds.make_objects(Node("tensordict", ()), found)

    def _path(self, names: tuple[str, ...]) -> Path:
        self.read.add("/".join(names))
        return join_parts(self.root, names, _NAME)

    def unread(self, *names: str) -> list[str]:
        """Return files below a directory that were not opened, among the first 10,000."""
        found = []
        top = self.root.joinpath(*names)
        for looked, path in enumerate(sorted(top.rglob("*")) if top.is_dir() else ()):
            relative = path.relative_to(self.root).as_posix()
            if looked < 10_000 and not path.is_dir() and relative not in self.read:
                found.append(relative)
        return found


def _map_file(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a file that holds exactly the elements of an array, copy-on-write.

    Raises:
        DamagedFileError: The file is missing or has another size.
    """
    nbytes, size = shape_nbytes(shape, dtype), file_size(path)
    if size != nbytes:
        damaged(path, f"it has {size} bytes, {nbytes} expected: {dtype}{list(shape)}")
    with torch.inference_mode(mode=False):
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8).view(dtype).view(shape)


def damaged(path: Path, problem: str) -> NoReturn:
    """Raise for a damaged file.

    Raises:
        DamagedFileError: Always.
    """
    files.damaged(path, problem, "or not part of a TorchRL checkpoint")
