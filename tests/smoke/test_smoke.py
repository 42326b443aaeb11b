"""Smoke tests of an installed wheel: each storage, sampler, unit, file format and command once, in seconds.

They import ostinato as it is installed, and need pytest only: no other file of this tree, no tensordict. The commands
are skipped where the extra `cli` is not installed. `make wheels` runs them over each wheel in a clean environment:

    python -m pytest -c tests/smoke/pytest.ini tests/smoke
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)  # of a pure-Python wheel: see test_the_wheel_says_which_backend
    import ostinato
from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    Trajectory,
    TrajectoryReplayBuffer,
    open_dataset,
)
from ostinato._backend import backend, use_backend
from ostinato.compat import isaacgymenvs, objectrl
from ostinato.errors import CheckpointError
from ostinato.tools import verify

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 6
"""Steps of an episode."""


def rows(count: int, start: int = 0) -> dict[str, Any]:
    """Steps of episodes of `LENGTH` rows: `t` counts them, and the other fields follow from it."""
    t = torch.arange(start, start + count)
    obs = t[:, None].float().expand(count, 3).contiguous()
    return {
        "t": t,
        "obs": obs,
        "goal": -obs,
        "next": {"obs": obs + 1, "achieved_goal": obs + 1, "reward": t.float(), "done": t % LENGTH == LENGTH - 1},
    }


def check(batch: dict[str, Any], size: int) -> None:
    """Fail unless a batch has `size` rows, each of them whole."""
    assert batch["t"].shape == (size,)
    assert torch.equal(batch["obs"][:, 0], batch["t"].float())
    assert torch.equal(batch["next"]["obs"], batch["obs"] + 1)
    assert torch.equal(batch["next"]["reward"], batch["t"].float())


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that chooses the backend as a user's does."""
    env = {name: value for name, value in os.environ.items() if name != "OSTINATO_NATIVE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**env, **environment}, capture_output=True, text=True, check=False, timeout=120)


# -- the wheel ---------------------------------------------------------------------------------------------------------


def test_the_wheel_says_which_backend():
    """A wheel with a compiled extension uses it; a pure-Python one warns once and names the consequence."""
    tag = re.findall(
        r"^Tag: (\S+)$", importlib.metadata.distribution("ostinato").read_text("WHEEL") or "", re.MULTILINE
    )
    assert tag
    done = run("import ostinato\nfrom ostinato._backend import backend\nprint(backend.native is not None)")
    assert done.returncode == 0, done.stderr
    if tag[0].endswith("-none-any"):
        assert done.stdout.strip() == "False"
        assert done.stderr.count("runs without its native extension") == 1
        assert run("import ostinato", OSTINATO_NATIVE="1").returncode != 0
    else:
        assert done.stdout.strip() == "True"
        assert "native extension" not in done.stderr
    assert "RuntimeWarning" not in run("import ostinato", OSTINATO_NATIVE="0").stderr


def test_the_version_is_that_of_the_wheel():
    assert ostinato.__version__ == importlib.metadata.version("ostinato")
    assert all(getattr(ostinato, name) is not None for name in ostinato.__all__)


# -- storages, samplers, units -----------------------------------------------------------------------------------------

STORAGES: dict[str, Any] = {
    "tensor": lambda _: LazyTensorStorage(24),
    "single copy": lambda _: LazyTensorStorage(24, single_copy=True),
    "compressed": lambda _: LazyTensorStorage(24, codec={"obs": "zlib"}),
    "memmap": lambda path: ostinato.LazyMemmapStorage(24, scratch_dir=path),
}


def test_storages_keep_rows_and_save_them(tmp_path):
    for name, make in STORAGES.items():
        place = tmp_path / name
        rb, other = (ReplayBuffer(storage=make(place / copy), batch_size=16) for copy in ("a", "b"))
        rb.extend(rows(30))
        check(rb.sample(), 16)
        rb.dumps(place / "saved")
        other.loads(place / "saved")
        assert sorted(other[:]["t"].tolist()) == sorted(rb[:]["t"].tolist()) == list(range(6, 30))
    for storage in (ListStorage(8), ostinato.CompressedListStorage(8)):
        listed = ReplayBuffer(storage=storage, batch_size=4, collate_fn=list)
        listed.extend([{"x": torch.full((4,), float(i))} for i in range(10)])
        assert {int(row["x"][0]) for row in listed.sample()} <= set(range(2, 10))
    writer = ostinato.ImmutableDatasetWriter()
    check(ReplayBuffer(storage=ostinato.TensorStorage(rows(12)), writer=writer, batch_size=6).sample(), 6)
    tokens = ostinato.RaggedTensorStorage(8, ragged="tokens", layout="padded")
    ragged = ReplayBuffer(storage=tokens, batch_size=4)
    ragged.extend([{"tokens": torch.arange(i + 1), "n": torch.tensor(i + 1)} for i in range(5)])
    assert (ragged.sample()["n"] >= 1).all()


_SLICES: dict[str, Any] = {"slice_len": 3, "end_key": ("next", "done")}
PARTS: list[Callable[[], Any]] = [
    ostinato.RandomSampler,
    ostinato.SamplerWithoutReplacement,
    lambda: PrioritizedSampler(48, alpha=0.7, beta=0.5),
    lambda: ostinato.SliceSampler(**_SLICES),
    lambda: ostinato.SliceSamplerWithoutReplacement(**_SLICES),
    lambda: ostinato.PrioritizedSliceSampler(48, alpha=0.7, beta=0.5, **_SLICES),
    lambda: ostinato.StreamingSliceSampler(**_SLICES),
    ostinato.QueueSampler,
    ostinato.StackSampler,
    lambda: ostinato.HeapSampler(48),
    lambda: ostinato.LimitedSampler(2),
    ostinato.ConsumingSampler,
    lambda: ostinato.PromptGroupSampler(samples_per_group=3, group_key="group"),
    lambda: ostinato.StalenessAwareSampler(version_key="group"),
    lambda: ostinato.SequenceUnit(4),
    lambda: ostinato.NStep(3, gamma=0.5),
    lambda: ostinato.FrameStack(2, "obs"),
    lambda: ostinato.DeltaTimestamps(steps={"obs": [-1, 0]}),
    lambda: ostinato.Hindsight(lambda batch: batch["next"]["reward"], goal_key="goal", achieved_goal_key="obs"),
]


def test_both_backends_draw_the_same_batches_of_every_sampler_and_unit():
    def draws(make: Callable[[], Any]) -> list[torch.Tensor]:
        part, seed = make(), torch.Generator().manual_seed(0)
        options = {"sampler" if isinstance(part, ostinato.Sampler) else "sample_unit": part}
        rb = ReplayBuffer(storage=LazyTensorStorage(48), batch_size=12, generator=seed, **options)
        rb.extend({**rows(48), "group": torch.arange(48) // LENGTH})
        batches = []
        for _ in range(2):
            batch, info = rb.sample(return_info=True)
            if "sampler" in options:
                check(batch, 12)
            if rb.sampler.prioritized:
                rb.update_priority(info, batch["t"].float() + 1)
            batches += [batch["t"], batch["obs"]]
        return batches

    for make in PARTS:
        with use_backend("torch"):
            alone = draws(make)
        if backend.installed is not None:
            with use_backend("native"):
                assert all(torch.equal(a, b) for a, b in zip(alone, draws(make), strict=True))


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_other_buffers():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), writer=ostinato.ReservoirWriter(), batch_size=4, prefetch=2)
    rb.extend(rows(100))
    check(rb.sample(), 4)
    members = [ReplayBuffer(storage=LazyTensorStorage(32)) for _ in range(2)]
    for member in members:
        member.extend(rows(16))
    with ostinato.ReplayBufferEnsemble(*members, p=[0.5, 0.5], batch_size=8) as both:
        assert both.sample()["t"].numel() == 8
    amp = isaacgymenvs.ReplayBuffer(9, torch.device("cpu"))
    amp.store({"amp_obs": torch.ones(12, 3)})
    assert amp.sample(4)["amp_obs"].shape == (4, 3)
    assert objectrl.ReplayBuffer is not None
    dataset = open_dataset({"action": torch.arange(100.0)[:, None]}, episode_ends=[40, 100])
    window = ostinato.DeltaTimestamps(steps={"action": range(8)})
    assert ReplayBuffer(storage=dataset, sample_unit=window, batch_size=16).sample()["action"].shape == (16, 8, 1)


def write(rb: ReplayBuffer, start: int) -> None:
    rb.extend({"x": torch.arange(start, start + 8)})


@pytest.mark.skipif(
    sys.platform != "linux" or backend.installed is None, reason="shared buffers need Linux and the native extension"
)
def test_several_processes_share_a_buffer():
    rb = ReplayBuffer(storage=LazyTensorStorage(32), shared=True, batch_size=8)
    rb.extend({"x": torch.arange(8)})
    context = multiprocessing.get_context("fork")  # starts at once; tests/unit has the other ways
    processes = [context.Process(target=write, args=(rb, start)) for start in (8, 16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(rb[:]["x"].tolist()) == list(range(24))
    assert set(rb.sample()["x"].tolist()) <= set(range(24))


# -- files -------------------------------------------------------------------------------------------------------------


def prioritized() -> ReplayBuffer:
    seed = torch.Generator().manual_seed(0)
    sampler = PrioritizedSampler(32, alpha=0.7, beta=0.5)
    return ReplayBuffer(storage=LazyTensorStorage(32), sampler=sampler, batch_size=8, generator=seed)


def test_a_loaded_checkpoint_continues_with_the_same_draws_and_a_damaged_one_raises(tmp_path):
    rb = prioritized()
    for start in (0, 20):
        rb.extend(rows(20, start))
        rb.update_priority(torch.tensor([1, 2]), torch.tensor([4.0, 5.0]))
        rb.dumps(tmp_path / "saved", incremental=True)
    expected = rb.sample()
    for mmap in (False, True):
        other = prioritized()
        other.loads(tmp_path / "saved", mmap=mmap)
        assert torch.equal(other[:]["t"], rb[:]["t"])
        assert torch.equal(other.sample()["t"], expected["t"])
    victim = max((path for path in (tmp_path / "saved").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CheckpointError):
        prioritized().loads(tmp_path / "saved")


def rollout(number: int) -> Trajectory:
    actions, images = torch.full((5, 2, 7), float(number)), torch.zeros(5, 2, 8, 8, 3, dtype=torch.uint8)
    return Trajectory(
        max_episode_length=5,
        actions=actions,
        rewards=actions[..., :1],
        curr_obs={"images": images, "task": ["stack the cubes"] * 2},
        next_obs={"images": images.clone()},
    )


def save_rollouts(path: Path, trajectory_format: str = "safetensors") -> None:
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=str(path), trajectory_format=trajectory_format, sample_window_size=0
    )
    future = buffer.add_trajectories([rollout(number) for number in range(3)])
    assert future is not None
    assert future.result(60) == [0, 1, 2]
    assert buffer.sample(num_chunks=16)["actions"].shape == (16, 7)
    buffer.close()
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(str(path))
    assert set(again.sample(64)["actions"].unique().tolist()) <= {0.0, 1.0, 2.0}
    again.close()
    assert not verify(path).damage


@pytest.mark.parametrize("trajectory_format", ["safetensors", "pt"])
def test_trajectories(tmp_path, trajectory_format):
    save_rollouts(tmp_path / "rollouts", trajectory_format)


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the function that the script `ostinato` runs, and return what it prints."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ostinato")

    def command(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["ostinato", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            sys.exit(script.load()())
        printed = capsys.readouterr()
        assert not ended.value.code, f"{arguments}: {printed.out}{printed.err}"
        return printed.out

    return command


needs_cli = pytest.mark.skipif(
    importlib.util.find_spec("typer") is None or importlib.util.find_spec("rich") is None,
    reason="the extra cli is not installed",
)


@needs_cli
def test_commands(tmp_path, command):
    for rank in range(2):
        save_rollouts(tmp_path / "buffer" / f"rank_{rank}")
    assert json.loads(command("inspect", "--json", tmp_path / "buffer" / "rank_0"))["trajectories"] == 3
    command("merge", tmp_path / "buffer", tmp_path / "merged")
    command("verify", tmp_path / "merged")
    command("split", tmp_path / "merged", tmp_path / "first", "--split-count", 2)
    command("sample", tmp_path / "first", "--num-samples", 4)
    command("convert", tmp_path / "first", tmp_path / "converted", "--format", "pt")
    rb = prioritized()
    for start in (0, 20):
        rb.extend(rows(20, start))
        rb.dumps(tmp_path / "saved", incremental=True)
    assert json.loads(command("inspect", "--json", tmp_path / "saved"))["rows"] == 32
    command("compact", tmp_path / "saved")
    command("verify", tmp_path / "saved")
    script = str(Path(sys.executable).parent / "ostinato")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, timeout=120)
    assert ostinato.__version__ in done.stdout
