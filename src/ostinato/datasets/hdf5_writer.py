"""Writes HDF5 files as robomimic and D4RL have them."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ostinato._optional import require
from ostinato.core.kinds import show_path
from ostinato.core.options import check_choice
from ostinato.datasets.format import Writing
from ostinato.datasets.transitions import Transitions, with_nested_names
from ostinato.errors import OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.dataset import DatasetStorage
    from ostinato.durable.progress import Progress

_CHUNK_BYTES = 32 << 20


class HdfPlan(NamedTuple):
    """What is written."""

    rows: Transitions
    names: dict[str, FieldPath]
    """Fields by their names in the file."""
    compression: str | None
    env_args: dict[str, Any] | None = None
    """How robomimic makes the environment."""

    def create(self, group: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new array in a group of the file."""
        return group.create_dataset(name, shape=shape, dtype=dtype, compression=self.compression)


def plan_d4rl(dataset: DatasetStorage, compression: str | None) -> HdfPlan:
    """Return what is written to a file of D4RL.

    Raises:
        SchemaError: if rows lack a field, or have several observations or actions.
        MissingExtraError: naming the extra to install.
    """
    require("h5py", "h5")
    rows = Transitions(dataset, "D4RL")
    for leaves in (rows.observations, rows.actions):
        if len(leaves) > 1 or len(leaves[0].path) > 1:
            msg = (
                f"D4RL holds one array of observations and one of actions, rows have {show_path(leaves[0].path)}: "
                "choose one of each with fields=, or use layout='robomimic'"
            )
            raise SchemaError(msg)
    names: dict[FieldPath, str] = {
        ("observation",): "observations",
        ("action",): "actions",
        ("next", "reward"): "rewards",
        ("next", "observation"): "next_observations",
    }
    others = {path: _joined(("infos", *path[1:]) if path[0] == "info" else path) for path in rows.leaves}
    return HdfPlan(rows, _named(rows, {**others, **names}, ("terminals", "timeouts")), compression)


def plan_robomimic(dataset: DatasetStorage, compression: str | None, env_args: Any) -> HdfPlan:
    """Return what is written to a file of robomimic.

    Raises:
        OptionError: if `env_args` is not JSON.
        SchemaError: if rows lack a field, or have several actions.
        MissingExtraError: naming the extra to install.
    """
    require("h5py", "h5")
    if env_args is not None:
        try:
            if not isinstance(env_args, dict):
                raise TypeError
            json.dumps(env_args, allow_nan=False)
        except (TypeError, ValueError) as error:
            msg = f"env_args must be a dict of JSON values, got {str(env_args)[:200]}"
            raise OptionError(msg) from error
    rows = Transitions(dataset, "robomimic", reward=False)
    if len(rows.actions[0].path) > 1:
        msg = (
            f"robomimic holds one array of actions, rows have {show_path(rows.actions[0].path)}: choose it with fields="
        )
        raise SchemaError(msg)
    names: dict[FieldPath, str] = {}
    known: dict[FieldPath, str] = {("action",): "actions", ("next", "reward"): "rewards"}
    for path in rows.leaves:
        inner, prefix = (path[1:], "next_obs") if path[:2] == ("next", "observation") else (path, "obs")
        if inner[0] == "observation":
            names[path] = _joined((prefix, *(inner[1:] or ("state",))))
        else:
            names[path] = known.get(path) or _joined(path)
    return HdfPlan(rows, _named(rows, names, ("dones",)), compression, env_args)


def _joined(path: FieldPath) -> str:
    bad = [key for key in path if "/" in str(key) or key in {"", ".", ".."}]
    if bad:
        msg = f"names in HDF5 have no '/', got {bad[0]!r} in {show_path(path)}: rename it with fields="
        raise SchemaError(msg)
    return "/".join(map(str, path))


def _named(rows: Transitions, names: dict[FieldPath, str], own: tuple[str, ...]) -> dict[str, FieldPath]:
    """Return fields by their names in the file, without flags.

    Raises:
        SchemaError: if two have one name.
    """
    found: dict[str, FieldPath] = {}
    for path in (*rows.leaves, *rows.texts):
        if path in rows.flag_paths:
            continue
        name = names.get(path) or _joined(path)
        taken = next((other for other in (*found, *own) if (other + "/").startswith(name + "/")), None)
        taken = taken or next((other for other in (*found, *own) if (name + "/").startswith(other + "/")), None)
        if taken is not None:
            msg = f"{show_path(path)} would be {name} in the file, where {taken} is: rename it with fields="
            raise SchemaError(msg)
        found[name] = path
    return found


def write_d4rl(plan: HdfPlan, path: Path, progress: Progress) -> None:
    """Write a file with one array for each field, in chunks of rows."""
    rows, count = plan.rows, len(plan.rows.dataset)
    with require("h5py", "h5").File(path, "w") as file:
        targets = {
            name: plan.create(file, name, (count, *_form(rows, field)[0]), _form(rows, field)[1])
            for name, field in plan.names.items()
        }
        for name, values in (("terminals", rows.terminated), ("timeouts", rows.truncated)):
            plan.create(file, name, (count,), np.dtype(bool))[:] = values
        largest = max(leaf.nbytes for leaf in rows.leaves.values())
        size = max(1, _CHUNK_BYTES // max(1, largest))
        for first in range(0, count, size):
            last = min(first + size, count)
            for name, field in plan.names.items():
                targets[name][first:last] = rows.rows(field, first, last)
            progress.advance(last - first)


def write_robomimic(plan: HdfPlan, path: Path, progress: Progress) -> None:
    """Write a file with a group for each episode."""
    rows = plan.rows
    with require("h5py", "h5").File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = len(rows.dataset)
        data.attrs["env_args"] = json.dumps(plan.env_args or {})
        for episode, (first, last) in enumerate(rows.spans()):
            group = data.create_group(f"demo_{episode}")
            group.attrs["num_samples"] = last - first
            for name, field in plan.names.items():
                shape, dtype = _form(rows, field)
                target = plan.create(group, name, (last - first, *shape), dtype)
                size = max(1, _CHUNK_BYTES // max(1, dtype.itemsize * math.prod(shape)))
                for at in range(first, last, size):
                    end = min(at + size, last)
                    target[at - first : end - first] = rows.rows(field, at, end)
            plan.create(group, "dones", (last - first,), np.dtype(np.uint8))[:] = rows.terminated[first:last]
            progress.advance(last - first)


def _form(rows: Transitions, path: FieldPath) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype of a field in one row."""
    if path in rows.texts:
        return (), require("h5py", "h5").string_dtype()
    return rows.leaves[path].shape, rows.rows(path, 0, 1).dtype


def _prepare_hdf5(dataset: DatasetStorage, given: Mapping[str, Any]) -> Callable[[Path, Progress], None]:
    layout = check_choice("layout", given.get("layout", "robomimic"), ("robomimic", "d4rl"))
    compression = check_choice("compression", given.get("compression", "none"), ("none", "gzip", "lzf"))
    dataset = with_nested_names(dataset, infos=False)
    packed, env_args = None if compression == "none" else compression, given.get("env_args")
    if layout == "robomimic":
        return partial(write_robomimic, plan_robomimic(dataset, packed, env_args))
    if env_args is not None:
        msg = "env_args is for layout='robomimic', D4RL has no place for it: leave it out"
        raise OptionError(msg)
    return partial(write_d4rl, plan_d4rl(dataset, packed))


WRITE = Writing("hdf5", ("layout", "env_args", "compression"), _prepare_hdf5, is_file=True)
