"""What works without tensordict, which is an extra, and what the rest says.

The code runs in processes whose imports of tensordict fail as they do where it is not installed: a finder in front of
all others finds no such package. `importlib.util.find_spec` then returns None, and an import raises
`ModuleNotFoundError`.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ostinato

ROOT = Path(__file__).parents[2]

BLOCK = """
import importlib.machinery, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {"tensordict", "torchrl"}:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


def run_without(code: str, *arguments: str) -> str:
    """Run code in a process without tensordict and return what it prints; it must never have been loaded."""
    code = f'{BLOCK}\n{code}\nassert "tensordict" not in sys.modules\n'
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WORKS = """
import collections, pathlib, tempfile
import numpy as np, torch
import ostinato
from ostinato import *

assert __import__("importlib.util").util.find_spec("tensordict") is None
for name in ostinato.__all__:
    getattr(ostinato, name)
import ostinato.compat.isaacgymenvs, ostinato.compat.objectrl, ostinato.compat.torchrl, ostinato.testing

Row = collections.namedtuple("Row", "obs reward")
ends = torch.tensor([False, False, False, True] * 8)
steps = torch.arange(32.0)
many = {"obs": torch.rand(32, 3), "reward": steps, "next": {"obs": torch.rand(32, 3), "done": ends}}
rows = {"obs": torch.rand(32, 3), "reward": steps, "done": ends}

# kinds of rows
for data in (many, {k: v.numpy() for k, v in rows.items()}, torch.rand(8, 3), np.ones((8, 3)),
             Row(torch.rand(8, 3), torch.rand(8)), (torch.rand(8),)):
    for sampler in (None, PrioritizedSampler(100, alpha=0.7, beta=0.5)):
        rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        rb.extend(data)
        batch, info = rb.sample(return_info=True)
        if sampler is not None:
            rb.update_priority(info["index"], torch.ones(4))
        assert type(batch) in (dict, Row, list, tuple, torch.Tensor), type(batch)
        repr(rb)

# storages
folder = pathlib.Path(tempfile.mkdtemp())
storages = [
    LazyTensorStorage(64), LazyTensorStorage(64, single_copy={"obs": "next_obs"}),
    LazyTensorStorage(64, codec={"obs": "zlib"}),
    LazyMemmapStorage(64), LazyMemmapStorage(64, scratch_dir=str(folder / "maps")),
]
for storage in storages:
    rb = ReplayBuffer(storage=storage, batch_size=4)
    rb.extend({"obs": steps[:, None], "next_obs": steps[:, None] + 1, "done": ends})
    assert (rb.sample()["obs"] < 32).all()
    rb.dumps(folder / f"{type(storage).__name__}{id(storage)}")
for storage in (ListStorage(10), CompressedListStorage(10)):
    rb = ReplayBuffer(storage=storage, batch_size=2, collate_fn=list)
    rb.extend([{"x": torch.ones(3)}, {"x": torch.zeros(3)}])
    rb.sample()
for layout in ("nested", "padded"):
    rb = ReplayBuffer(storage=RaggedTensorStorage(64, ragged="tokens", layout=layout), batch_size=2)
    rb.extend({"tokens": [[1, 2], [3]], "reward": torch.zeros(2)})
    rb.sample()

# samplers and units
for sampler in (RandomSampler(), SamplerWithoutReplacement(), SliceSampler(slice_len=2, end_key="done"),
                PrioritizedSliceSampler(max_capacity=64, alpha=0.7, beta=0.5, slice_len=2, end_key="done"),
                StackSampler(), ConsumingSampler(), StreamingSliceSampler(slice_len=2, end_key="done")):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, batch_size=4)
    rb.extend(rows)
    rb.add({"obs": np.ones(3, np.float32), "reward": 1.0, "done": True})
    rb.sample()
for unit in (NStep(3, gamma=0.9), SequenceUnit(2), DeltaTimestamps(steps={"obs": [-1, 0]})):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), sample_unit=unit, batch_size=4)
    rb.extend(many)
    rb.sample()
rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(64), batch_size=4)
rb.extend(rows)
rb.append_transform(RewardScale(2.0))
batch, info = rb.sample(return_info=True)
rb.update_priority(info, torch.ones(4))

# checkpoints, datasets, several buffers
rb.dumps(folder / "saved")
other = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(64), batch_size=4)
other.loads(folder / "saved")
other.sample()
dataset = open_dataset(folder / "saved")
assert set(ReplayBuffer(storage=dataset, batch_size=4).sample()) == set(rows)
mixed = ReplayBufferEnsemble(rb, other, p=[0.5, 0.5], batch_size=4)
mixed.sample()
online = OfflineToOnlineReplayBuffer(dataset, online_capacity=64, offline_fraction=0.5, batch_size=4)
online.extend(rows)
online.sample()

# trajectories
rollout = Trajectory(rewards=torch.rand(5, 2, 1), curr_obs={"states": torch.rand(5, 2, 8)})
with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(folder / "rollouts")) as buffer:
    buffer.add_trajectories([rollout]).result()
    assert buffer.sample(num_chunks=4)["curr_obs"]["states"].shape == (4, 8)
from ostinato.compat import isaacgymenvs
isaac = isaacgymenvs.ReplayBuffer(8, "cpu")
isaac.store({"a": torch.rand(8, 2)})
isaac.sample(2)
print("done")
"""


def test_rows_of_dicts_arrays_and_tensors_need_no_tensordict():
    assert run_without(WORKS).splitlines()[-1] == "done"


RAISES = """
import torch
from ostinato import *
from ostinato.compat import objectrl, torchrl
from ostinato.errors import MissingExtraError

rb = ReplayBuffer(storage=LazyTensorStorage(8))
rb.extend({"reward": torch.ones(4), "episode": torch.zeros(4)})
arrays = {"obs": torch.zeros(4, 2)}
makers = {
    "TensorDictReplayBuffer": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(8)),
    "TensorDictPrioritizedReplayBuffer": lambda: TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(8)),
    "HERReplayBuffer": lambda: HERReplayBuffer(
        reward_fn=lambda *goals: goals[0], storage=LazyTensorStorage(8)),
    "TensorDictReplayBuffer ": lambda: objectrl.ReplayBuffer("cpu", "cpu", 8),
    "LazyStackStorage": lambda: LazyStackStorage(8),
    "consolidated=True": lambda: LazyTensorStorage(8, consolidated=True),
    "TED2Flat": TED2Flat, "Flat2TED": Flat2TED, "TED2Nested": TED2Nested, "Nested2TED": Nested2TED,
    "TED2Flat ": FlatStorageCheckpointer, "TED2Nested ": NestedStorageCheckpointer,
    "TED2Nested  ": H5StorageCheckpointer,
    "query()": lambda: rb.query(traj.reward > 0),
    "ostinato.compat.torchrl.Trajectory": lambda: torchrl.Trajectory,
    "a dataset with rows that are TensorDicts": lambda: open_dataset(arrays, episode_ends=[4], tensordict=True),
}
for what, make in makers.items():
    try:
        make()
    except MissingExtraError as error:
        print(error)
        assert str(error).startswith(f"{what.strip()} needs tensordict, which is not installed: "), error
        assert ": run pip install 'ostinato[tensordict]', or " in str(error), error
        assert isinstance(error, ImportError)
    else:
        raise SystemExit(f"{what} was made without tensordict")
"""


LOADS = """
from pathlib import Path
import torch
from ostinato import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, open_dataset
from ostinato.errors import MissingExtraError

place = Path(sys.argv[1])
rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
rb.extend({"x": torch.arange(3)})
for fresh in (ReplayBuffer(storage=LazyTensorStorage(10)), ReplayBuffer(storage=LazyMemmapStorage(10)), rb):
    for options in ({}, {"mmap": True}) if type(fresh.storage) is LazyTensorStorage else ({},):
        before = len(fresh)
        try:
            fresh.loads(place, **options)
        except MissingExtraError as error:
            assert "a checkpoint whose rows are TensorDicts needs tensordict" in str(error), error
            assert "pip install 'ostinato[tensordict]'" in str(error)
        else:
            raise SystemExit("it was loaded")
        assert len(fresh) == before
assert sorted(rb[:]) == ["x"]
from ostinato.cli.main import main
for command in (["inspect", str(place)], ["doctor", str(place)]):
    sys.argv = ["ostinato", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
"""


def test_what_needs_tensordict_says_so_before_anything_is_made_or_loaded(tmp_path):
    import torch

    tensordict = pytest.importorskip("tensordict")
    pytest.importorskip("typer")
    rb = ostinato.ReplayBuffer(storage=ostinato.LazyTensorStorage(10), batch_size=4)
    rb.extend(tensordict.TensorDict({"x": torch.rand(5), "done": torch.tensor([False] * 4 + [True])}, [5]))
    rb.dumps(tmp_path / "saved")
    messages = run_without(RAISES + LOADS, str(tmp_path / "saved")).splitlines()
    assert messages[0] == (
        "TensorDictReplayBuffer needs tensordict, which is not installed: run pip install 'ostinato[tensordict]', or "
        "use ReplayBuffer with rows that are dicts of tensors"
    )


def test_tensordict_is_an_extra_and_not_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [name for name in project["dependencies"] if "tensordict" in name]
    assert [name.partition(">")[0] for name in project["optional-dependencies"]["tensordict"]] == ["tensordict"]
