"""What environments return: checked, on tensors, and without aliases of memory that the next step overwrites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.buffers.options import leaves_by_path
from ostinato.core import kinds
from ostinato.core.casts import cast
from ostinato.core.kinds import as_tensor, show_path
from ostinato.errors import KindError, OptionError, SchemaError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.rows import Path

__all__ = ["as_mode", "final_observations", "flag_each", "observations", "one_each", "per_env"]

_MODES = {"NEXTSTEP": "NEXT_STEP", "SAMESTEP": "SAME_STEP", "DISABLED": "DISABLED"}
_FINAL = ("final_obs", "final_observation")
"""Gymnasium's name since 1.1, and the one before, which some simulators still use."""


def as_mode(mode: Any) -> str:
    """Return the name of an autoreset mode, given as Gymnasium's enum, its name or its value.

    Raises:
        OptionError: for anything else.
    """
    text = str(getattr(mode, "name", mode)).replace("_", "").upper()
    if text not in _MODES:
        msg = f"autoreset_mode must be one of {list(_MODES.values())}, got {mode!r}"
        raise OptionError(msg)
    return _MODES[text]


def one_each(name: str, values: Any, envs: int) -> Tensor:
    """Return one number per environment, `[envs]`.

    Raises:
        SchemaError: for another shape.
    """
    tensor = as_tensor(np.asarray(values) if isinstance(values, (list, tuple)) else values, (name,))
    if tensor.shape not in {(envs,), (envs, 1)}:
        msg = f"{name} must hold one value per environment, shape [{envs}], got {list(tensor.shape)}"
        raise SchemaError(msg)
    return tensor.reshape(envs)


def flag_each(name: str, values: Any, envs: int) -> Tensor:
    """Return one bool per environment, `[envs]`, on the CPU.

    Raises:
        SchemaError: for another shape, or values that are neither true nor false.
    """
    tensor = one_each(name, values, envs).cpu()
    flags = tensor != 0
    if tensor.dtype is not flags.dtype and not bool((tensor == flags).all()):
        msg = f"{name} must hold bools (or zeros and ones), got {tensor.dtype} {tensor.tolist()[:8]}"
        raise SchemaError(msg)
    return flags


def per_env(name: str, data: Any, envs: int) -> dict[Path, Tensor]:
    """Return the leaves of data `[envs, *shape]`, an array or a dict of arrays, by their paths; `()` for an array.

    Raises:
        SchemaError: for another number of environments.
        KindError: for data of another kind.
    """
    if isinstance(data, list):
        data = np.asarray(data)
    nested = isinstance(data, dict) or kinds.is_tensordict(data)
    leaves: dict[Any, Any] = leaves_by_path(data) if nested else {(): data}
    out: dict[Path, Tensor] = {}
    for path, leaf in leaves.items():
        tensor = as_tensor(leaf, (name, *path))
        if tensor.shape[:1] != (envs,):
            msg = f"{name}{_at(path)} must be of {envs} environment(s), [{envs}, ...], got shape {list(tensor.shape)}"
            raise SchemaError(msg)
        out[path] = tensor
    return out


def observations(data: Any, envs: int, like: dict[Path, Tensor] | None, warned: set[Any]) -> dict[Path, Tensor]:
    """Return observations as `per_env` does, cast to the dtypes in `like`, those before. Copies.

    Raises:
        SchemaError: if they have other entries or shapes, or values that do not fit the dtypes.
    """
    out = per_env("obs", data, envs)
    if like is not None:
        _check_like(out, like)
        fitted = {path: cast(tensor, like[path].dtype, ("obs", *path), warned) for path, tensor in out.items()}
        return {path: tensor.clone() if tensor is out[path] else tensor for path, tensor in fitted.items()}
    return {path: tensor.clone() for path, tensor in out.items()}


def _check_like(data: dict[Path, Tensor], like: dict[Path, Tensor]) -> None:
    if data.keys() != like.keys():
        msg = (
            f"obs has the entries {sorted(map(show_path, data))}, those before had {sorted(map(show_path, like))}: "
            "they must stay the same"
        )
        raise SchemaError(msg)
    for path, tensor in data.items():
        if tensor.shape != like[path].shape:
            msg = f"obs{_at(path)} must have shape {list(like[path].shape)}, as before, got {list(tensor.shape)}"
            raise SchemaError(msg)


def final_observations(
    after: dict[Path, Tensor], ended: Tensor, info: Mapping[str, Any], warned: set[Any]
) -> dict[Path, Tensor]:
    """Return the observations `after` a step, of environments that ended in it the last ones, from `info`.

    Raises:
        UsageError: if `info` has none for one of them.
        SchemaError: if one of them has another shape, or values that do not fit the dtype.
    """
    which = ended.nonzero().flatten().tolist()
    if not which:
        return after
    name = next((name for name in _FINAL if name in info), None)
    there = None if name is None else info.get(f"_{name}")
    lacking = [env for env in which if name is None or (there is not None and not bool(there[env]))]
    if lacking:
        raise UsageError(_no_final(lacking))
    out = {path: value.clone() for path, value in after.items()}
    for env in which:
        for path, value in out.items():
            last = _entry(info[name], path, env)  # type: ignore[index]
            if last is None:
                raise UsageError(_no_final([env]))
            tensor = as_tensor(last, (str(name), *path))
            if tensor.shape != value.shape[1:]:
                msg = (
                    f"info[{name!r}]{_at(path)} of environment {env} must have shape {list(value.shape[1:])}, got "
                    f"{list(tensor.shape)}"
                )
                raise SchemaError(msg)
            value[env] = cast(tensor, value.dtype, (str(name), *path), warned)
    return out


def _no_final(envs: list[int]) -> str:
    return (
        f"environment(s) {envs} ended, and info['final_obs'] has no last observation of them, which autoreset_mode "
        "'SAME_STEP' needs: pass info as the environment's step returned it"
    )


def _entry(final: Any, path: Path, env: int) -> Any:
    """Find one environment's entry, in an array of dicts as well as in a dict of arrays."""
    node, chosen = final, False
    try:
        for key in path:
            if not (isinstance(node, Mapping) or kinds.is_tensordict(node)):
                node, chosen = node[env], True
            if node is None:
                return None
            node = node[key]
        return node if chosen else node[env]
    except (KeyError, IndexError, TypeError):
        msg = f"info['final_obs'] has no entry{_at(path)} of environment {env}: {type(final).__name__} of another form"
        raise KindError(msg) from None


def _at(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
