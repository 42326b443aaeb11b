"""Minari's own reader beside ours on the files that its writer made: every number of every episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("minari")

from ...datasets.builders import Key, minari_dataset

if TYPE_CHECKING:
    from pathlib import Path


def leaves(values: Any, path: tuple[str, ...]) -> dict[tuple[str, ...], np.ndarray[Any, Any]]:
    """The arrays of a nest of dicts by their paths."""
    if not isinstance(values, dict):
        return {path: np.asarray(values)}
    return {key: found for name, part in values.items() for key, found in leaves(part, (*path, name)).items()}


def official(name: str) -> tuple[list[int], dict[Key, np.ndarray[Any, Any]]]:
    """What Minari's reader returns, as transitions of all episodes in order."""
    import minari

    episodes = list(minari.load_dataset(name).iterate_episodes())
    columns: dict[Key, list[np.ndarray[Any, Any]]] = {}
    for episode in episodes:
        parts: dict[Key, np.ndarray[Any, Any]] = {}
        for path, values in leaves(episode.observations, ("observation",)).items():
            parts[path if len(path) > 1 else path[0]] = values[:-1]
            parts["next", *path] = values[1:]
        parts["action"] = episode.actions
        parts["next", "reward"] = episode.rewards
        parts["next", "terminated"] = episode.terminations
        parts["next", "truncated"] = episode.truncations
        parts["next", "done"] = episode.terminations | episode.truncations
        for key, values in parts.items():
            columns.setdefault(key, []).append(values)
    return [len(episode.rewards) for episode in episodes], {key: np.concatenate(v) for key, v in columns.items()}


@pytest.mark.parametrize(
    ("data_format", "observation", "action"),
    [("hdf5", "box", "box"), ("hdf5", "image", "box"), ("arrow", "dict", "discrete"), ("parquet", "image", "discrete")],
)
def test_every_number(
    data_format: str, observation: str, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato import open_dataset

    lengths = [6, 1, 8, *[2] * 9]  # twelve: episode 10 sorts before episode 2 as a text
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    minari_dataset(
        tmp_path / "arm-v0", lengths=lengths, data_format=data_format, observation=observation, action=action
    )
    counts, columns = official("arm-v0")
    dataset = open_dataset(tmp_path / "arm-v0")
    assert counts == lengths == dataset.episode_lengths.tolist()
    for key, values in columns.items():
        found = dataset[key].numpy()
        assert found.dtype == values.dtype, key
        np.testing.assert_array_equal(found.reshape(values.shape), values, err_msg=str(key))
