"""Writes Minari datasets, through Minari: observations have one row more than steps."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ostinato._optional import require
from ostinato.core.kinds import show_path
from ostinato.datasets.format import Writing
from ostinato.datasets.transitions import Transitions, with_nested_names
from ostinato.errors import OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ostinato.core.rows import Leaf
    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.dataset import DatasetStorage
    from ostinato.durable.progress import Progress

_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+")
_REWARD: FieldPath = ("next", "reward")


class MinariPlan(NamedTuple):
    """What is written."""

    rows: Transitions
    observation_space: Any
    action_space: Any
    infos: list[FieldPath]


def plan_minari(dataset: DatasetStorage, dataset_id: Any) -> MinariPlan:
    """Return what is written, after all checks but that of the order of observations.

    Raises:
        OptionError: if the name is no name of Minari.
        SchemaError: if rows lack a field, or have one that Minari has no place for.
        MissingExtraError: naming the extra to install.
    """
    require("minari", "minari")
    if not isinstance(dataset_id, str) or not _ID.fullmatch(dataset_id):
        msg = f"dataset_id must be name-v0 or namespace/name-v0, got {dataset_id!r}"
        raise OptionError(msg)
    rows = Transitions(dataset, "Minari", text=False)
    infos = [leaf.path for leaf in rows.below("info")]
    known = {leaf.path for leaf in (*rows.observations, *rows.actions)} | rows.flag_paths | {_REWARD, *infos}
    known |= {("next", *leaf.path) for leaf in rows.observations} | {("next", *path) for path in infos}
    others = [path for path in rows.leaves if path not in known]
    if others:
        msg = (
            f"Minari holds observation, action, reward, flags and info, and no {show_path(others[0])}: leave it out "
            f"with fields=, or name it {('info', *others[0])!r}"
        )
        raise SchemaError(msg)
    missing = [leaf.path for leaf in rows.observations if ("next", *leaf.path) not in rows.leaves]
    if missing:
        warnings.warn(
            f"rows have no {show_path(('next', *missing[0]))}: the observation after the last step of each episode is "
            "unknown, and the last one is written twice",
            UserWarning,
            stacklevel=2,
        )
    return MinariPlan(rows, _space(rows, rows.observations, 1), _space(rows, rows.actions, 1), infos)


def _space(rows: Transitions, leaves: list[Leaf], depth: int) -> Any:
    """Return the space of leaves below the same `depth` keys."""
    spaces = require("gymnasium.spaces", "minari")
    if len(leaves) == 1 and len(leaves[0].path) == depth:
        return _box(rows, leaves[0])
    keys = list(dict.fromkeys(leaf.path[depth] for leaf in leaves))
    groups = {key: [leaf for leaf in leaves if leaf.path[depth] == key] for key in keys}
    return spaces.Dict({key: _space(rows, group, depth + 1) for key, group in groups.items()})


def _box(rows: Transitions, leaf: Leaf) -> Any:
    """Return the space of a field: discrete for numbers from 0 on, else a box."""
    spaces = require("gymnasium.spaces", "minari")
    dtype = rows.rows(leaf.path, 0, 1).dtype
    if dtype == np.bool_:
        return spaces.MultiBinary(leaf.shape or 1)
    if dtype == np.int64 and leaf.shape == ():
        values = rows.whole(leaf.path)
        if values.min() >= 0:
            return spaces.Discrete(int(values.max()) + 1)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, leaf.shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, leaf.shape, dtype.type)


def write_minari(dataset: DatasetStorage, plan: MinariPlan, dataset_id: str, folder: Path, progress: Progress) -> None:
    """Write a dataset to an empty folder, episode by episode. Memory: the rows of one episode.

    Raises:
        SchemaError: if the next observation of a step is not the observation of the next step.
    """
    minari = require("minari", "minari")
    storage_module = require("minari.dataset.minari_storage", "minari")
    kind = storage_module.MinariStorage
    raw = {"jpeg_encoding": False} if "jpeg_encoding" in inspect.signature(kind.new).parameters else {}
    storage = kind.new(
        folder / "data",
        observation_space=plan.observation_space,
        action_space=plan.action_space,
        data_format="hdf5",
        **raw,
    )
    storage.update_episodes(_episodes(plan, progress))
    storage.update_metadata(
        {"dataset_id": dataset_id, "minari_version": f"{minari.__version__}", "description": f"From {dataset.format}."}
    )


def _episodes(plan: MinariPlan, progress: Progress) -> Iterator[Any]:
    """Yield the episodes as Minari takes them."""
    buffer = require("minari.data_collector.episode_buffer", "minari").EpisodeBuffer
    rows = plan.rows
    for episode, (first, last) in enumerate(rows.spans()):
        observations = {leaf.path: rows.with_last(leaf.path, episode, first, last) for leaf in rows.observations}
        actions = {leaf.path: rows.rows(leaf.path, first, last) for leaf in rows.actions}
        infos = {
            path: rows.with_last(path, episode, first, last)
            if ("next", *path) in rows.leaves
            else rows.rows(path, first, last)
            for path in plan.infos
        }
        yield buffer(
            id=episode,
            observations=_nested(observations),
            actions=_nested(actions),
            rewards=rows.rows(_REWARD, first, last).reshape(last - first),
            terminations=rows.terminated[first:last],
            truncations=rows.truncated[first:last],
            infos=_nested(infos) if infos else None,
        )
        progress.advance(last - first)


def _nested(values: dict[FieldPath, Any]) -> Any:
    """Return fields below one key as they are nested."""
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        if len(path) == 1:
            return value
        level = tree
        for key in path[1:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = value
    return tree


def _prepare_minari(dataset: DatasetStorage, given: Mapping[str, Any]) -> Callable[[Path, Progress], None]:
    name = given.get("dataset_id", "ostinato/export-v0")
    dataset = with_nested_names(dataset, infos=True)
    plan = plan_minari(dataset, name)
    return lambda place, bar: write_minari(dataset, plan, name, place, bar)


WRITE = Writing("minari", ("dataset_id",), _prepare_minari)
