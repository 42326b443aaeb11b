"""Sampler and generator of a TorchRL checkpoint, as the states of ours."""

from __future__ import annotations

import math
import os
import pickletools
from typing import TYPE_CHECKING, Any

import torch

from ostinato.compat.torchrl.files import damaged
from ostinato.durable.files import open_file
from ostinato.errors import CheckpointError
from ostinato.samplers import PrioritizedSampler, RandomSampler, Sampler, SamplerWithoutReplacement

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.compat.torchrl.files import Folder
    from ostinato.compat.torchrl.rows import Ring

__all__ = ["batch_size", "generator_state", "note_the_rest", "sampler_of"]

_SAMPLERS = "RandomSampler, PrioritizedSampler and SamplerWithoutReplacement can"
_EMPTY_QUEUE_BYTES = 4096
_CALLS = frozenset(
    {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "EXT1", "EXT2", "EXT4"}
)
"""What an empty queue needs none of."""


def sampler_of(folder: Folder, ring: Ring) -> tuple[Sampler, dict[str, Any]]:
    """Return a sampler like the one saved, and its state.

    Raises:
        CheckpointError: if it is of a kind that cannot be carried over.
        DamagedFileError: naming the file.
    """
    if folder.has("sampler", "sampler_metadata.json"):
        return _prioritized(folder, ring)
    if folder.has("sampler", "meta.json"):
        return _epochs(folder, ring)
    rest = folder.unread("sampler")
    if rest:
        msg = f"{folder.root / rest[0]} is of a sampler that cannot be carried over: {_SAMPLERS}"
        raise CheckpointError(msg)
    sampler = RandomSampler()
    return sampler, sampler.state_dict()


def _prioritized(folder: Folder, ring: Ring) -> tuple[Sampler, dict[str, Any]]:
    path = folder.root / "sampler" / "sampler_metadata.json"
    about = folder.json("sampler", "sampler_metadata.json")
    alpha, beta, eps, capacity = (_number(about.get(f"_{name}")) for name in ("alpha", "beta", "eps", "max_capacity"))
    pair = about.get("_max_priority")
    largest = _number(pair[0]) if isinstance(pair, list) and pair else None
    if alpha is None or beta is None or eps is None or largest is None or capacity is None or capacity % 1:
        damaged(path, f"it must tell alpha, beta, eps, the largest priority and the capacity, got {str(about)[:200]}")
    if capacity < ring.capacity:
        damaged(path, f"its capacity is {capacity:.0f}, that of the storage {ring.capacity}")
    entry = {"dtype": "torch.float64", "shape": [int(capacity)]}
    values = folder.array(entry, "sampler", "sumtree.memmap")[: ring.rows].clone()
    if not bool(((values >= 0) & (values < math.inf)).all()):
        damaged(folder.root / "sampler" / "sumtree.memmap", "its values must be finite and at least 0")
    if alpha > 0:
        priorities = (values.pow(1 / alpha) - eps).clamp_(min=0.0)
    else:
        priorities = torch.full_like(values, largest if largest > 0 else 1.0)
        folder.notes.append("with alpha=0 TorchRL saves no priorities: all rows have the largest one")
    if not bool((priorities < math.inf).all()):
        damaged(folder.root / "sampler" / "sumtree.memmap", f"its values are too large for alpha={alpha:g}")
    folder.read.add("sampler/mintree.memmap")  # it repeats the other one
    sampler = PrioritizedSampler(int(capacity), alpha, beta, eps)
    state = sampler.state_dict()
    state |= {"priorities": priorities, "values": values, "values_alpha": alpha, "largest": largest}
    return sampler, state


def _number(value: Any) -> float | None:
    good = type(value) in {int, float} and 0 <= value < 2**53
    return float(value) if good else None


def _epochs(folder: Folder, ring: Ring) -> tuple[Sampler, dict[str, Any]]:
    path = folder.root / "sampler" / "meta.json"
    saved = folder.tensordict("sampler")
    found = dict(saved.items())
    last, left, rows = (found.get(name) for name in ("drop_last", "_sample_list", "len_storage"))
    if not (isinstance(last, torch.Tensor) and last.numel() == 1):
        msg = f"{path} is of a sampler that cannot be carried over: {_SAMPLERS}"
        raise CheckpointError(msg)
    sampler = SamplerWithoutReplacement(drop_last=bool(last))
    state = sampler.state_dict()
    folder.notes.append("TorchRL does not save whether SamplerWithoutReplacement shuffles: it does from here on")
    order = _order(left, rows, ring)
    if order is None or left is None:
        folder.notes.append("the pass of SamplerWithoutReplacement cannot go on where it was: a new one begins")
    else:
        state |= {"order": order, "rows": ring.rows, "at": ring.rows - int(left.numel())}
    return sampler, state


def _order(left: Any, rows: Any, ring: Ring) -> Tensor | None:
    """Return an order in which the rows that were drawn come first; None if the list is not of these rows."""
    if not (isinstance(left, torch.Tensor) and left.dtype is torch.int64 and left.ndim == 1 and ring.lanes == 1):
        return None
    if not isinstance(rows, torch.Tensor) or rows.numel() != 1 or int(rows) != ring.rows or left.numel() > ring.rows:
        return None
    if left.numel() == 0 or not 0 <= int(left.min()) <= int(left.max()) < ring.rows:
        return None
    drawn = torch.ones(ring.rows, dtype=torch.bool, device="cpu")
    drawn[left] = False
    return torch.cat((drawn.nonzero().flatten(), left)) if int(drawn.sum()) + left.numel() == ring.rows else None


def generator_state(folder: Folder) -> Tensor | None:
    """Return the state of the generator that the buffer owned; None where there was none.

    Raises:
        DamagedFileError: naming the file.
    """
    if not folder.has("rng_state"):
        return None
    about = folder.json("rng_state", "meta.json")
    if about.get("device") != "cpu":
        folder.notes.append(f"the generator was one of {str(about.get('device'))[:40]}: it is left out, give a new one")
        folder.read.add("rng_state/rng_state.memmap")
        return None
    state = dict(folder.tensordict("rng_state").items()).get("rng_state")
    path = folder.root / "rng_state" / "rng_state.memmap"
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.ndim != 1:
        damaged(path, "it must be the state of a generator, uint8")
    try:
        torch.Generator().set_state(state.clone())
    except RuntimeError as error:
        damaged(path, f"torch does not take it as the state of a generator: {str(error)[:200]}")
    return state.clone()


def batch_size(folder: Folder) -> int | None:
    """Return the batch size of the buffer.

    Raises:
        DamagedFileError: naming the file.
    """
    about = folder.json("buffer_metadata.json")
    size = about.get("batch_size")
    if size is not None and (type(size) is not int or not 0 < size < 2**40):
        damaged(folder.root / "buffer_metadata.json", f"batch_size must be positive or null, got {str(size)[:40]}")
    if about.get("consume_after_n_samples") is not None:
        folder.notes.append("consume_after_n_samples has no counterpart: rows stay until they are overwritten")
    return size


def note_the_rest(folder: Folder) -> None:
    """Say of files that nothing was read from what they were; none of them is unpickled."""
    if folder.has("transform.t"):
        folder.notes.append("the states of transforms (transform.t) are left out: append the transforms anew")
        folder.read.add("transform.t")
    if folder.has("prefetch.pkl"):
        folder.read.add("prefetch.pkl")
        if not _is_empty_queue(folder):
            folder.notes.append("batches made ahead (prefetch.pkl) are left out: they are pickled")
    rest = folder.unread()
    if rest:
        folder.notes.append(f"{len(rest)} files are not named by any metadata, and left out: {', '.join(rest[:3])}")


def _is_empty_queue(folder: Folder) -> bool:
    """Look at the steps of a pickle, without carrying them out, for one that could make a tensor."""
    fd = open_file(folder.root / "prefetch.pkl")
    with os.fdopen(fd, "rb") as file:
        text = file.read(_EMPTY_QUEUE_BYTES + 1)
    if len(text) > _EMPTY_QUEUE_BYTES:
        return False
    try:
        return not any(step.name in _CALLS for step, _, _ in pickletools.genops(text))
    except (ValueError, IndexError, OverflowError):
        return False
