"""DatasetStorage: buffers over it sample what buffers over the same rows in memory sample, whatever the columns are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import (
    DatasetStorage,
    Episodes,
    FrameStack,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    TensorDictReplayBuffer,
    export,
    open_dataset,
)
from ostinato.core.rows import Leaf
from ostinato.datasets.cache import BlockCache
from ostinato.datasets.columns import BlockColumn, DenseColumn, MovedColumn, TensorColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.decoded import HeapRows
from ostinato.datasets.open import registered
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
    SlotError,
    UsageError,
)
from ostinato.tools import examine

from ..tags import same_state
from .builders import last_rows
from .samples import flat, not_opened

if TYPE_CHECKING:
    from ostinato.datasets.columns import DatasetColumn

LENGTHS = (7, 1, 12, 30, 5, 45)
ROWS = sum(LENGTHS)


class Blocks:
    """Blocks of rows of a tensor."""

    def __init__(self, values: torch.Tensor, cuts: list[int]) -> None:
        self.values, self.dtype, self.shape = values, values.dtype, tuple(values.shape[1:])
        self.starts = np.array([0, *sorted(set(cuts) - {0, len(values)}), len(values)])

    def load(self, block: int) -> torch.Tensor:
        return self.values[self.starts[block] : self.starts[block + 1]].clone()

    def close(self) -> None:
        """Nothing is open."""


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    rows = sum(lengths)
    ends = torch.from_numpy(last_rows(lengths))
    terminated = ends & (torch.arange(rows) % 2 == 0)
    observation = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    return {
        "observation": observation,
        "action": torch.arange(rows * 2, dtype=torch.float64).view(rows, 2),
        "pixels": torch.arange(rows * 4, dtype=torch.int64).view(rows, 1, 2, 2).to(torch.uint8),
        "next": {
            "observation": observation + 1,
            "reward": torch.arange(rows, dtype=torch.float32),
            "terminated": terminated,
            "truncated": ends & ~terminated,
            "done": ends,
        },
    }


def reverse(rows: torch.Tensor) -> torch.Tensor:
    return ROWS - 1 - rows


def column_of(kind: str, value: torch.Tensor, cache: BlockCache) -> DatasetColumn:
    block = BlockColumn(Blocks(value, [3, 20, 21, 64, 99]), cache)
    if kind == "dense":
        return DenseColumn(block, len(value), HeapRows(), "x")
    if kind == "moved":
        return MovedColumn(TensorColumn(value.flip(0)), reverse)
    return block if kind == "block" else TensorColumn(value)


def dataset_of(kind: str, data: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> DatasetStorage:
    """A dataset whose columns are all of one kind, or of different kinds."""
    cache = BlockCache(600)
    columns: dict[Any, Any] = {}
    for i, (path, value) in enumerate(flat(data).items()):
        which = ("tensor", "block", "dense", "moved")[i % 4] if kind == "mixed" else kind
        columns[path] = column_of(which, value, cache)
    return DatasetStorage(Contents(kind, columns, torch.tensor(lengths)))


def same(one: Any, two: Any) -> None:
    same_state(flat(one), flat(two))


PARTS: dict[str, Any] = {
    "uniform": lambda: {"sampler": RandomSampler()},
    "prioritized": lambda: {"sampler": PrioritizedSampler(ROWS, 0.7, 0.5)},
    "slices": lambda: {"sampler": SliceSampler(slice_len=4)},
    "n-step": lambda: {"sample_unit": NStep(3, 0.5)},
    "sequence": lambda: {"sample_unit": SequenceUnit(4, burn_in=2, bootstrap=1)},
    "frames": lambda: {"sample_unit": FrameStack(3, ["pixels"])},
    "prefetch": lambda: {"prefetch": 3},
}


def buffers(name: str, kind: str, seed: int = 0) -> tuple[ReplayBuffer, ReplayBuffer]:
    """A buffer over a dataset, and one over the same rows in memory."""
    data = rows_of()
    known, opened = (
        ReplayBuffer(storage=storage, batch_size=12, generator=torch.Generator().manual_seed(seed), **PARTS[name]())
        for storage in (LazyTensorStorage(ROWS), dataset_of(kind, data))
    )
    known.extend(data)
    return opened, known


@pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")  # next observations are random
@pytest.mark.parametrize("name", PARTS)
def test_a_dataset_is_sampled_as_the_same_rows_in_memory_and_resumes_exactly(name, tmp_path):
    opened, known = buffers(name, "mixed")
    for _ in range(3):
        found, info = opened.sample(return_info=True)
        expected, wanted = known.sample(return_info=True)
        same(found, expected)
        if name == "prioritized":
            assert torch.equal(info["priority_weight"], wanted["priority_weight"])
            for rb in (opened, known):
                rb.update_priority(info["index"], torch.arange(12.0))
    opened.dumps(tmp_path / "save")
    again, _ = buffers(name, "block", seed=9)
    assert sum(path.stat().st_size for path in (tmp_path / "save").rglob("*")) < 60_000
    with pytest.raises(CheckpointError, match="another dataset"):
        again.loads(tmp_path / "save")  # its format has another name
    again, _ = buffers(name, "mixed", seed=9)
    again.loads(tmp_path / "save")
    for _ in range(4):
        expected = known.sample()
        same(again.sample(), expected)
        same(opened.sample(), expected)


def test_episodes_are_chosen_and_ordered():
    data = rows_of()
    dataset = open_dataset(data, episodes=[3, 0], episode_ends=np.cumsum(LENGTHS))
    assert dataset["observation"].tolist() == data["observation"][[*range(20, 50), *range(7)]].tolist()
    assert dataset.episode_lengths.tolist() == [30, 7]
    rb = ReplayBuffer(storage=dataset, sampler=SliceSampler(slice_len=7), batch_size=70)
    first = rb.sample()["observation"][:, 0].reshape(-1, 7)
    assert (first.diff(dim=1) == 3).all()
    assert open_dataset(data, episodes=slice(1, 3), episode_ends=np.cumsum(LENGTHS)).episode_lengths.tolist() == [1, 12]
    for wrong in ([], [6], 2, [-7]):
        not_opened(data, (OptionError, SlotError), None, episodes=wrong, episode_ends=np.cumsum(LENGTHS))
    data["lap"] = torch.arange(ROWS) % 10 == 9
    laps = Episodes(end_key="lap")
    rb = ReplayBuffer(storage=open_dataset(data), sampler=SliceSampler(slice_len=10), episodes=laps, batch_size=40)
    assert (rb.sample()["lap"].reshape(-1, 10)[:, -1]).all()


def test_fields_are_chosen_and_renamed():
    data = rows_of()
    kept = open_dataset(data, fields=["action", "next"])
    assert set(kept.schema.paths) == {path for path in flat(data) if path[0] in {"action", "next"}}
    renamed = open_dataset(data, fields={"obs": "observation", ("next", "obs"): ("next", "observation")})
    same(renamed[:], {"obs": data["observation"], "next": {"obs": data["next"]["observation"]}})
    not_opened(data, KeyMissingError, "no field 'velocity': it has 'observation'", fields=["velocity"])
    wrong: list[Any] = ["action", {("a", "b"): "observation", "a": "action"}, [5], [()], {3: "action"}]
    for fields in wrong:
        not_opened(data, OptionError, "fields", fields=fields)


def test_a_dataset_is_read_only_and_says_what_it_holds():
    dataset = open_dataset(rows_of())
    assert repr(dataset).startswith("DatasetStorage(arrays, rows=100, episodes=6, fields=['observation'")
    assert dataset.schema.leaves[0] == Leaf(("observation",), torch.float32, (3,))
    assert dataset.nbytes == 100 * (12 + 16 + 4 + 12 + 4 + 3)
    rb = ReplayBuffer(storage=dataset, batch_size=4)
    for change in (
        lambda: rb.extend(rows_of()),
        lambda: rb.add({"observation": 0}),
        rb.empty,
        lambda: rb.__setitem__(0, rb[1]),
        lambda: dataset.set(0, rb[1]),
        lambda: dataset.clear(),
    ):
        with pytest.raises(UsageError, match=r"read-only.*load_dataset"):
            change()
    assert len(rb) == ROWS


def test_rows_are_tensordicts_if_asked_for():
    dataset = open_dataset(rows_of(), tensordict=True)
    rb = TensorDictReplayBuffer(storage=dataset, batch_size=6, sampler=PrioritizedSampler(ROWS, 0.6, 0.4))
    batch = rb.sample()
    assert batch.batch_size == (6,)
    assert (batch["next", "observation"] == batch["observation"] + 1).all()
    batch["td_error"] = torch.ones(6)
    rb.update_tensordict_priority(batch)
    assert dataset[3]["next"]["reward"] == 3


def test_ends_are_found_in_mappings_or_said_to_be_missing():
    values = {"a": np.arange(10)}
    for source in (
        {**values, "episode_ends": np.array([4, 10])},
        {"data": values, "meta": {"episode_ends": [4, 10]}},
        {**values, "done": np.arange(10) == 3},
        {**values, "next": {"truncated": np.arange(10) == 3}},
    ):
        dataset = open_dataset(source)
        assert dataset.episode_lengths.tolist() == [4, 6]
        assert dataset["a"].tolist() == list(range(10))
    wrong: list[Any] = [
        (values, [5, 9], "ends at row 9, the fields have 10 rows"),
        (values, [5, 4, 10], r"episode 1 would be the rows \[5, 4\)"),
        (values, [0.5], "integers"),
        (values, None, "nothing tells where episodes end"),
        ({**values, "b": np.zeros(9)}, [10], "'b' has 9 rows, 'a' has 10"),
        ({}, None, "no array"),
    ]
    for data, ends, message in wrong:
        not_opened(data, SchemaError, message, episode_ends=ends)
    for option in ({"max_bytes": 0}, {"num_threads": 0}, {"tolerance_s": 0.0}, {"max_bytes": True}):
        not_opened(values, OptionError, next(iter(option)), episode_ends=[10], **option)


def test_a_block_above_the_budget_takes_the_place_of_no_other():
    cache = BlockCache(100)
    for key, rows in (("small", 10), ("large", 1000)):
        assert len(cache.get(key, lambda rows=rows: torch.arange(rows))) == rows  # type: ignore[misc]
    assert "small" in cache
    assert "large" not in cache
    assert cache.nbytes == 80


def test_a_package_adds_a_format_by_an_entry_point(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/datasets.md").read_text()
    module = re.findall(r"```python\n(.*?)```", text[text.index("## Add a format") :], flags=re.DOTALL)[0]
    assert module.count("\n") <= 120
    (tmp_path / "npz_format.py").write_text(module)
    (tmp_path / "npz-1.dist-info").mkdir()
    points = tmp_path / "npz-1.dist-info/entry_points.txt"
    points.write_text("[ostinato.datasets]\nnpz = npz_format:FORMAT\n")
    monkeypatch.syspath_prepend(tmp_path)
    registered.cache_clear()
    try:
        values = {name: np.random.default_rng(0).normal(size=(50, 2)) for name in ("observation", "action")}
        export({**values, "episode_ends": [20, 50]}, tmp_path / "data", format="npz")
        dataset = open_dataset(tmp_path / "data")
        assert (dataset.format, dataset.episode_lengths.tolist()) == ("npz", [20, 30])
        np.testing.assert_array_equal(dataset["action"], values["action"])
        assert examine(tmp_path / "data").ok
        (tmp_path / "data/episode_000001.npz").write_bytes(b"nothing")
        not_opened(tmp_path / "data", DamagedFileError, r"episode_000001\.npz: it cannot be read")
        assert examine(tmp_path / "data").findings[0].place == "episode_000001.npz, episode 1"
        points.write_text("[ostinato.datasets]\nnpz = npz_format:NAMES\n")
        registered.cache_clear()
        not_opened(tmp_path / "data", KindError, r"npz = npz_format:NAMES of ostinato.datasets must be a Format")
    finally:
        registered.cache_clear()
