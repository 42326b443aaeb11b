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

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)  # of a pure-Python wheel: see test_the_wheel_says_which_backend
    import ostinato
from ostinato import (
    ConsumingSampler,
    DeltaTimestamps,
    FrameStack,
    HeapSampler,
    Hindsight,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    QueueSampler,
    RaggedTensorStorage,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackSampler,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorStorage,
    Trajectory,
    TrajectoryReplayBuffer,
    VectorEnvRecorder,
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

TENSORDICT = importlib.util.find_spec("tensordict") is not None


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


def test_the_wheel_says_which_backend() -> None:
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


def test_the_version_is_that_of_the_wheel() -> None:
    assert ostinato.__version__ == importlib.metadata.version("ostinato")
    assert all(getattr(ostinato, name) is not None for name in ostinato.__all__)


def test_both_backends_draw_the_same_batches() -> None:
    def draws() -> list[torch.Tensor]:
        sampler = PrioritizedSampler(32, alpha=0.7, beta=0.5)
        seed = torch.Generator().manual_seed(0)
        rb = ReplayBuffer(storage=LazyTensorStorage(32), sampler=sampler, batch_size=8, generator=seed)
        rb.extend(rows(40))
        batches = []
        for _ in range(5):
            batch, info = rb.sample(return_info=True)
            rb.update_priority(info, batch["t"].float() + 1)
            batches.append(batch["t"])
        return batches

    with use_backend("torch"):
        alone = draws()
    if backend.installed is not None:
        with use_backend("native"):
            compiled = draws()
        assert all(torch.equal(a, b) for a, b in zip(alone, compiled, strict=True))
    assert len({tuple(batch.tolist()) for batch in alone}) == 5


NO_TENSORDICT = """
import sys
sys.modules["tensordict"] = None  # as if it were not installed
import ostinato, torch
from ostinato.errors import MissingExtraError
storage = ostinato.LazyTensorStorage(10)
for use in (
    lambda: ostinato.TensorDictReplayBuffer(storage=storage, batch_size=4).extend({"x": torch.zeros(3)}),
    lambda: ostinato.TensorDictPrioritizedReplayBuffer(alpha=1, beta=1, storage=storage).extend({"x": torch.zeros(3)}),
):
    try:
        use()
    except MissingExtraError as error:
        print(error)
"""


def test_tensordict_buffers_name_the_extra_that_is_missing() -> None:
    done = run(NO_TENSORDICT, OSTINATO_NATIVE="0")
    assert done.stdout.count("'ostinato[tensordict]'") == 2, done.stdout + done.stderr


@pytest.mark.skipif(not TENSORDICT, reason="the extra tensordict is not installed")
def test_tensordicts_come_back_as_tensordicts() -> None:
    from tensordict import TensorDict

    rb = ostinato.TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(20), batch_size=8, priority_key="td_error"
    )
    rb.extend(TensorDict({"x": torch.arange(20)}, [20]))
    batch = rb.sample()
    assert isinstance(batch, TensorDict)
    batch["td_error"] = torch.ones(8)
    rb.update_tensordict_priority(batch)
    assert batch["index"].tolist() == batch["x"].tolist()


# -- storages, samplers, units -----------------------------------------------------------------------------------------

STORAGES: dict[str, Callable[[Path], Any]] = {
    "tensor": lambda path: LazyTensorStorage(24),
    "single copy": lambda path: LazyTensorStorage(24, single_copy=True),
    "compressed": lambda path: LazyTensorStorage(24, codec={"obs": "zlib"}),
    "memmap": lambda path: LazyMemmapStorage(24, scratch_dir=path / "rows"),
}


@pytest.mark.parametrize("name", STORAGES)
def test_storages_of_tensors(name: str, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=STORAGES[name](tmp_path), batch_size=16)
    rb.extend(rows(20))
    for step in rows(10, 20)["t"].tolist():
        rb.add({key: _row(value) for key, value in rows(1, step).items()})
    assert len(rb) == 24
    assert sorted(rb[:]["t"].tolist()) == list(range(6, 30))
    check(rb.sample(), 16)
    rb.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=STORAGES[name](tmp_path / "other"), batch_size=16)
    other.loads(tmp_path / "saved")
    assert torch.equal(other[:]["t"], rb[:]["t"])
    check(other.sample(), 16)


def _row(value: Any) -> Any:
    return {key: part[0] for key, part in value.items()} if isinstance(value, dict) else value[0]


def test_storages_of_objects_lists_and_given_tensors() -> None:
    listed = ReplayBuffer(storage=ListStorage(8), batch_size=4, collate_fn=list)
    listed.extend([{"text": f"row {i}"} for i in range(10)])
    assert {row["text"] for row in listed.sample()} <= {f"row {i}" for i in range(2, 10)}
    packed = ReplayBuffer(storage=ostinato.CompressedListStorage(8), batch_size=4, collate_fn=list)
    packed.extend([{"x": torch.full((4,), float(i))} for i in range(8)])
    assert len(packed.sample()) == 4
    given = ReplayBuffer(storage=TensorStorage(rows(12)), writer=ImmutableDatasetWriter(), batch_size=6)
    check(given.sample(), 6)
    ragged = ReplayBuffer(storage=RaggedTensorStorage(8, ragged="tokens", layout="padded"), batch_size=4)
    ragged.extend([{"tokens": torch.arange(i + 1), "n": torch.tensor(i + 1)} for i in range(5)])
    assert (ragged.sample()["n"] >= 1).all()


@pytest.mark.skipif(not TENSORDICT, reason="the extra tensordict is not installed")
def test_lazy_stacks() -> None:
    from tensordict import TensorDict

    rb = ReplayBuffer(storage=ostinato.LazyStackStorage(8), batch_size=3)
    rb.extend([TensorDict({"x": torch.arange(i + 1)}) for i in range(4)])
    assert len(rb.sample()) == 3


SAMPLERS: dict[str, tuple[Callable[[], Any], int]] = {
    "random": (RandomSampler, 12),
    "without replacement": (SamplerWithoutReplacement, 12),
    "prioritized": (lambda: PrioritizedSampler(48, alpha=0.7, beta=0.5), 12),
    "slices": (lambda: SliceSampler(slice_len=3, end_key=("next", "done")), 12),
    "slices without replacement": (
        lambda: SliceSamplerWithoutReplacement(slice_len=3, end_key=("next", "done")),
        12,
    ),
    "prioritized slices": (
        lambda: PrioritizedSliceSampler(48, alpha=0.7, beta=0.5, slice_len=3, end_key=("next", "done")),
        12,
    ),
    "streaming slices": (lambda: StreamingSliceSampler(slice_len=3, end_key=("next", "done")), 12),
    "queue": (QueueSampler, 12),
    "stack": (StackSampler, 12),
    "heap": (lambda: HeapSampler(48), 12),
    "limited": (lambda: LimitedSampler(2), 12),
    "consuming": (ConsumingSampler, 12),
    "prompt groups": (lambda: PromptGroupSampler(samples_per_group=3, group_key="group"), 12),
    "staleness": (lambda: StalenessAwareSampler(version_key="group"), 12),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name: str) -> None:
    make, size = SAMPLERS[name]
    generator = torch.Generator().manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(48), sampler=make(), batch_size=size, generator=generator)
    data = rows(48)
    rb.extend({**data, "group": data["t"] // LENGTH})
    batch, info = rb.sample(return_info=True)
    check(batch, size)
    if "slices" in name:
        t = batch["t"].view(-1, 3)
        assert (t.diff(dim=1) == 1).all()
        assert (t[:, 0] // LENGTH == t[:, -1] // LENGTH).all()  # no slice crosses the end of an episode
    if "prioritized" in name:
        rb.update_priority(info, torch.full((size,), 0.25))
        assert rb.sample(return_info=True)[1]["priority_weight"].shape == (size,)


UNITS: dict[str, Callable[[], Any]] = {
    "sequence": lambda: SequenceUnit(4),
    "n-step": lambda: NStep(3, gamma=0.5),
    "frames": lambda: FrameStack(2, "obs"),
    "timestamps": lambda: DeltaTimestamps(steps={"obs": [-1, 0]}),
    "hindsight": lambda: Hindsight(lambda batch: batch["next"]["reward"], goal_key="goal", achieved_goal_key="obs"),
}


@pytest.mark.parametrize("name", UNITS)
def test_units(name: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(48), sample_unit=UNITS[name](), batch_size=8)
    rb.extend(rows(48))
    batch = rb.sample()
    if name == "n-step":
        first = batch["t"] if batch["t"].ndim == 1 else batch["t"][:, 0]
        left = (LENGTH - first % LENGTH).clamp(max=3)
        discounts = torch.tensor([1, 0.5, 0.25])
        returns = ((first[:, None] + torch.arange(3)) * discounts * (torch.arange(3) < left[:, None])).sum(1)
        assert torch.allclose(batch["next"]["reward"], returns.float())
    elif name == "sequence":
        assert batch["t"].reshape(8, 4).shape == (8, 4)
    else:
        assert batch["obs"].shape[0] == 8


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_priorities_decide_the_draws() -> None:
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=1e-9, storage=LazyTensorStorage(8), batch_size=4000)
    index = rb.extend({"x": torch.arange(8)})
    rb.update_priority(index, torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 3.0]))
    drawn = rb.sample()["x"].bincount(minlength=8)
    assert drawn[1:7].sum() <= 4
    assert abs(int(drawn[7]) - 3000) < 200  # 7 standard deviations


def test_prefetch_gives_the_same_batches() -> None:
    def draws(prefetch: int) -> list[list[int]]:
        seed = torch.Generator().manual_seed(0)
        with ReplayBuffer(storage=LazyTensorStorage(32), batch_size=8, prefetch=prefetch, generator=seed) as rb:
            rb.extend(rows(32))
            return [rb.sample()["t"].tolist() for _ in range(5)]

    assert draws(2) == draws(0)


def test_writers_limits_ensembles_and_environments() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), writer=ReservoirWriter(), batch_size=4)
    rb.extend(rows(100))
    check(rb.sample(), 4)
    limiter = RateLimiter(samples_per_insert=1, error_buffer=32, min_size_to_sample=8)
    limited = ReplayBuffer(storage=LazyTensorStorage(32), batch_size=4, rate_limiter=limiter)
    limited.extend(rows(16), timeout_s=1.0)
    check(limited.sample(timeout_s=1.0), 4)
    ranked = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(32))
    ranked.extend(rows(16))
    with ReplayBufferEnsemble(rb, ranked, p=[0.5, 0.5], batch_size=8) as both:
        assert both.sample()["t"].numel() == 8
    envs = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), batch_size=6)
    steps = VectorEnvRecorder(envs, 2, "SAME_STEP")
    obs, over = np.zeros((2, 3), np.float32), np.zeros(2, bool)
    steps.reset(obs)
    for number in range(5):
        steps.add_step(np.arange(2), obs + number, np.ones(2), over, over, {})
    assert len(envs) == 10


def write(rb: ReplayBuffer, start: int) -> None:
    rb.extend({"x": torch.arange(start, start + 8)})


@pytest.mark.skipif(
    sys.platform != "linux" or backend.installed is None, reason="shared buffers need Linux and the native extension"
)
def test_several_processes_share_a_buffer() -> None:
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


def test_buffers_with_the_interface_of_other_libraries() -> None:
    amp = isaacgymenvs.ReplayBuffer(9, torch.device("cpu"))
    amp.store({"amp_obs": torch.ones(12, 3)})
    assert amp.sample(4)["amp_obs"].shape == (4, 3)
    assert objectrl.ReplayBuffer is not None


# -- files -------------------------------------------------------------------------------------------------------------


def prioritized() -> ReplayBuffer:
    seed = torch.Generator().manual_seed(0)
    sampler = PrioritizedSampler(32, alpha=0.7, beta=0.5)
    return ReplayBuffer(storage=LazyTensorStorage(32), sampler=sampler, batch_size=8, generator=seed)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_loaded_checkpoint_continues_with_the_same_draws(tmp_path: Path, mmap: bool) -> None:
    rb = prioritized()
    rb.extend(rows(20))
    rb.dumps(tmp_path / "saved", incremental=True)
    rb.extend(rows(20, 20))
    rb.update_priority(torch.tensor([1, 2]), torch.tensor([4.0, 5.0]))
    rb.dumps(tmp_path / "saved", incremental=True)
    other = prioritized()
    other.loads(tmp_path / "saved", mmap=mmap)
    assert torch.equal(other[:]["t"], rb[:]["t"])
    assert torch.equal(other.sample()["t"], rb.sample()["t"])


def test_a_damaged_checkpoint_raises(tmp_path: Path) -> None:
    rb = prioritized()
    rb.extend(rows(20))
    rb.dumps(tmp_path / "saved")
    victim = max((path for path in (tmp_path / "saved").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CheckpointError):
        prioritized().loads(tmp_path / "saved")


def rollout(number: int) -> Trajectory:
    steps, envs = 5, 2
    return Trajectory(
        max_episode_length=steps,
        model_weights_id=f"model_{number}",
        actions=torch.full((steps, envs, 7), float(number)),
        rewards=torch.rand(steps, envs, 1),
        dones=torch.zeros(steps, envs, 1, dtype=torch.bool),
        curr_obs={"images": torch.zeros(steps, envs, 8, 8, 3, dtype=torch.uint8), "task": ["stack the cubes"] * envs},
        next_obs={"images": torch.zeros(steps, envs, 8, 8, 3, dtype=torch.uint8)},
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


@pytest.mark.parametrize("trajectory_format", ["safetensors", "pt"])
def test_trajectories(tmp_path: Path, trajectory_format: str) -> None:
    save_rollouts(tmp_path / "rollouts", trajectory_format)
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(str(tmp_path / "rollouts"))
    assert set(again.sample(64)["actions"].unique().tolist()) <= {0.0, 1.0, 2.0}
    again.save_checkpoint(str(tmp_path / "saved"))
    again.close()
    assert not verify(tmp_path / "saved").damage


def test_arrays_are_a_dataset() -> None:
    arrays = {"observation": torch.randn(100, 4), "action": torch.arange(100.0)[:, None]}
    dataset = open_dataset(arrays, episode_ends=[40, 100])
    window = DeltaTimestamps(steps={"observation": [-1, 0], "action": range(8)})
    batch = ReplayBuffer(storage=dataset, sample_unit=window, batch_size=16).sample()
    assert batch["action"].shape == (16, 8, 1)
    assert batch["observation"].shape == (16, 2, 4)


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
def test_commands_on_trajectories(tmp_path: Path, command: Callable[..., str]) -> None:
    for rank in range(2):
        save_rollouts(tmp_path / "buffer" / f"rank_{rank}")
    assert json.loads(command("inspect", "--json", tmp_path / "buffer" / "rank_0"))["trajectories"] == 3
    command("merge", tmp_path / "buffer", tmp_path / "merged")
    command("verify", tmp_path / "merged")
    command("split", tmp_path / "merged", tmp_path / "first", "--split-count", 2)
    command("sample", tmp_path / "first", "--num-samples", 4)
    command("convert", tmp_path / "first", tmp_path / "converted", "--format", "pt")


@needs_cli
def test_commands_on_a_checkpoint(tmp_path: Path, command: Callable[..., str]) -> None:
    rb = prioritized()
    for start in (0, 20):
        rb.extend(rows(20, start))
        rb.dumps(tmp_path / "saved", incremental=True)
    assert json.loads(command("inspect", "--json", tmp_path / "saved"))["rows"] == 32
    command("compact", tmp_path / "saved")
    command("verify", tmp_path / "saved")
    assert ostinato.__version__ in command("--version")


@needs_cli
def test_the_installed_script_runs() -> None:
    scripts = Path(sys.executable).parent
    done = subprocess.run([scripts / "ostinato", "--version"], capture_output=True, text=True, check=True, timeout=120)
    assert ostinato.__version__ in done.stdout
