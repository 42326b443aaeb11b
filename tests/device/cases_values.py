"""A buffer on a device gives what the same buffer gives on the CPU: every part that draws, reads or writes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

import ostinato
from ostinato import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from ostinato.compat.isaacgymenvs import ReplayBuffer as AmpBuffer
from ostinato.compat.objectrl import ReplayBuffer as ObjectBuffer
from ostinato.core.records import Draw, Picks
from ostinato.testing import StorageContract
from tests.device.backend import DEVICE, DeviceTensor, MixedDevicesError, no_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ostinato.core.records import Plan, View
    from ostinato.protocols import Ring

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_chance() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def rows(first: int, count: int, device: torch.device) -> dict[str, Any]:
    """Rows of episodes of seven, numbered."""
    number = torch.arange(first, first + count, device=device)
    end = number % 7 == 6
    return {
        "obs": number[:, None].float() * torch.ones(3, device=device),
        "next_obs": (number + 1 + 100 * end)[:, None].float() * torch.ones(3, device=device),
        "reward": number.float() / 8,
        "done": end,
        "id": number,
        "version": number // 10,
        "achieved": number.float(),
        "next_achieved": number.float() + 1,
        "desired": -number.float(),
    }


def reward(batch: Any) -> torch.Tensor:
    made: torch.Tensor = (batch["next_achieved"] == batch["desired"]).float()
    return made


def on_cpu(value: Any) -> Any:
    """Bring everything to the CPU, and TensorDicts to dicts."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [on_cpu(each) for each in value]
    if hasattr(value, "batch_size"):
        return {key: value.get(key).cpu() for key in value.keys(include_nested=True, leaves_only=True)}
    return value


def places(value: Any) -> set[str]:
    """Return the types of devices of all tensors."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return set().union(*map(places, parts)) if parts else set()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        exact = not one.is_floating_point()  # sums of a window are added up in another order
        return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "RandomSampler": ostinato.RandomSampler,
    "SamplerWithoutReplacement, in order": lambda: ostinato.SamplerWithoutReplacement(shuffle=False),
    "endless, in order": lambda: ostinato.SamplerWithoutReplacement(shuffle=False, endless=True),
    "PrioritizedSampler": lambda: ostinato.PrioritizedSampler(60, 0.7, 0.5),
    "PrioritizedSampler, stratified": lambda: ostinato.PrioritizedSampler(60, 0.7, 0.5, stratified=True),
    "PrioritizedSampler, within": lambda: ostinato.PrioritizedSampler(60, 0.7, 0.5, max_priority_within_buffer=True),
    "QueueSampler": ostinato.QueueSampler,
    "LimitedSampler": lambda: ostinato.LimitedSampler(8),
    "SliceSampler": lambda: ostinato.SliceSampler(slice_len=4, end_key="done", truncated_key=None),
    "SliceSampler, any length": lambda: ostinato.SliceSampler(slice_len=4, end_key="done", strict_length=False),
    "SliceSampler, padded": lambda: ostinato.SliceSampler(
        slice_len=4, end_key="done", strict_length=False, pad_output=True
    ),
    "SliceSampler, span": lambda: ostinato.SliceSampler(slice_len=4, end_key="done", span=True),
    "SliceSampler, ids": lambda: ostinato.SliceSampler(num_slices=4, traj_key="version"),
    "slices without replacement, in order": lambda: ostinato.SliceSamplerWithoutReplacement(
        slice_len=4, end_key="done", shuffle=False
    ),
    "PrioritizedSliceSampler": lambda: ostinato.PrioritizedSliceSampler(60, 0.7, 0.5, slice_len=4, end_key="done"),
    "PrioritizedSliceSampler, any length": lambda: ostinato.PrioritizedSliceSampler(
        60, 0.7, 0.5, slice_len=4, end_key="done", strict_length=False
    ),
}
UNITS: dict[str, Callable[[], Any]] = {
    "NStep": lambda: ostinato.NStep(3, 0.9),
    "Sequence": lambda: ostinato.Sequence(3, burn_in=1, bootstrap=1, done_key="done"),
    "Sequence, stop": lambda: ostinato.Sequence(3, "stop", done_key="done"),
    "Sequence, strict": lambda: ostinato.Sequence(3, "strict", done_key="done"),
    "Sequence, include_reset": lambda: ostinato.Sequence(3, "include_reset", done_key="done"),
    "FrameStack": lambda: ostinato.FrameStack(3, ["obs"]),
    "FrameStack, zeros": lambda: ostinato.FrameStack(3, ["obs"], padding="zeros", merge=True),
    **{
        f"Hindsight, {strategy}": partial(
            ostinato.Hindsight, reward, strategy=strategy, goal_key="desired", achieved_goal_key="achieved"
        )
        for strategy in ("future", "final", "episode", "random")
    },
}
WRITERS: dict[str, Callable[[], Any]] = {
    "ReservoirWriter": lambda: ostinato.ReservoirWriter(generator=torch.Generator().manual_seed(1)),
    "TensorDictMaxValueWriter": lambda: ostinato.TensorDictMaxValueWriter(rank_key="reward"),
}
STORAGES: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: LazyTensorStorage(60, device=device),
    "auto": lambda device: LazyTensorStorage(60, device="auto"),
    "single copy": lambda device: LazyTensorStorage(60, device=device, single_copy=True),
}


def script(rb: Any, device: torch.device, size: int = 16) -> list[Any]:
    """Write, draw, edit and learn; return everything that came back."""
    torch.manual_seed(0)
    seen: list[Any] = []

    def some(first: int, count: int) -> Any:
        data = rows(first, count, device)
        return TensorDict(data, [count], device=device) if rb.writer.collections_only else data

    for first in range(0, 90, 30):
        seen.append(rb.extend(some(first, 30)))
        seen.append(rb.sample(size, return_info=True))
        batch, info = seen[-1]
        assert places(batch) <= {device.type}
        if rb.sampler.prioritized:
            rb.update_priority(info, info["index"].double() + 1)
            rb.update_priority(torch.arange(3, device=device), 5.0)
            seen.append(rb.sampler.priorities)
    if not rb.sampler.counting:
        rb[2:5] = some(200, 3)
        rb[torch.tensor([7, 9], device=device)] = some(300, 2)
        seen.append(rb.sample(size, return_info=True))
    seen += [rb[3], rb[1:4], rb[torch.tensor([4, -1], device=device)], rb[[0, 2]], rb.stats().rows, len(rb)]
    rb.empty()
    rb.extend(some(0, 20))
    seen.append(rb.sample(size))
    return [on_cpu(each) for each in seen]


def check(make: Callable[[torch.device], Any]) -> None:
    here, there = script(make(CPU), CPU), script(make(DEVICE), DEVICE)
    for step, (one, other) in enumerate(zip(here, there, strict=True)):
        assert same(one, other), f"step {step}: {one} on the CPU, {other} on the device"


_FEW = ("RandomSampler", "PrioritizedSampler", "SliceSampler")


@pytest.mark.parametrize(
    ("sampler", "storage"),
    [*((x, "device") for x in SAMPLERS), *((x, "single copy") for x in _FEW), ("RandomSampler", "auto")],
)
def test_samplers(sampler: str, storage: str) -> None:
    check(lambda device: ReplayBuffer(storage=STORAGES[storage](device), sampler=SAMPLERS[sampler](), batch_size=16))


_SOME = ("NStep", "Sequence, strict", "FrameStack")


@pytest.mark.parametrize(
    ("unit", "storage", "sampler"),
    [
        *((x, "device", "RandomSampler") for x in UNITS),
        *((x, "single copy", "RandomSampler") for x in _SOME),
        *((x, "device", "PrioritizedSampler") for x in _SOME),
    ],
)
def test_units(unit: str, storage: str, sampler: str) -> None:
    def make(device: torch.device) -> ReplayBuffer:
        parts = {"sampler": SAMPLERS[sampler](), "sample_unit": UNITS[unit]()}
        return ReplayBuffer(storage=STORAGES[storage](device), batch_size=16, **parts)

    check(make)


@pytest.mark.parametrize("sampler", ["RandomSampler", "PrioritizedSampler"])
@pytest.mark.parametrize("writer", WRITERS)
def test_writers(writer: str, sampler: str) -> None:
    def make(device: torch.device) -> ReplayBuffer:
        parts = {"sampler": SAMPLERS[sampler](), "writer": WRITERS[writer]()}
        return ReplayBuffer(storage=STORAGES["device"](device), batch_size=16, **parts)

    check(make)


def test_prefetch_and_collate() -> None:
    def run(device: torch.device) -> Any:
        torch.manual_seed(0)
        rb = ReplayBuffer(storage=LazyTensorStorage(60, device=device), batch_size=16, prefetch=2, collate_fn=dict)
        rb.extend(rows(0, 70, device))
        return on_cpu([rb.sample() for _ in range(5)])

    assert same(run(CPU), run(DEVICE))


def test_transforms() -> None:
    chain = (
        ostinato.RenameFields({"id": "number"}),
        ostinato.ExcludeFields("version"),
        ostinato.RewardScale(2.0, loc=0.5),
    )

    def make(device: torch.device) -> ReplayBuffer:
        rb = ReplayBuffer(storage=LazyTensorStorage(60, device=device), batch_size=16)
        for transform in (*chain, ostinato.ToDevice(device), ostinato.CastFields(torch.float64, "obs")):
            rb.append_transform(transform)
        return rb

    here = on_cpu(make_and_sample(make(CPU), CPU))
    assert same(here, on_cpu(make_and_sample(make(DEVICE), DEVICE)))


def make_and_sample(rb: ReplayBuffer, device: torch.device) -> Any:
    torch.manual_seed(0)
    rb.extend(rows(0, 30, device))
    return rb.sample()


def test_samples_moved_to_the_cpu_and_to_the_device() -> None:
    far = ReplayBuffer(storage=LazyTensorStorage(60, device=DEVICE), batch_size=16, transform=ostinato.ToDevice("cpu"))
    near = ReplayBuffer(storage=LazyTensorStorage(60), batch_size=16, transform=ostinato.ToDevice("fakegpu"))
    one = {key: value.clone() for key, value in make_and_sample(far, DEVICE).items()}  # before anything else waits
    other = make_and_sample(near, CPU)
    assert places(one) == {"cpu"}
    assert places(other) == {"fakegpu"}
    assert same(one, on_cpu(other))


@pytest.mark.parametrize("prioritized", [False, True])
def test_two_dimensions(prioritized: bool) -> None:
    def run(device: torch.device) -> Any:
        torch.manual_seed(0)
        storage = LazyTensorStorage(60, device=device, ndim=2)
        sampler = SAMPLERS["PrioritizedSampler" if prioritized else "RandomSampler"]()
        rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16, dim_extend=0)
        seen: list[Any] = []
        for first in range(0, 90, 30):
            data = rows(first, 30, device)
            grid = {key: value.reshape(6, 5, *value.shape[1:]) for key, value in data.items()}
            seen += [rb.extend(TensorDict(grid, [6, 5], device=device)), rb.sample()]
        if prioritized:
            rb.update_priority(seen[-1]["index"], torch.ones(16, device=device))
        return on_cpu([*seen, rb[2], rb[:, 1], rb[2, 3], rb.sample()])

    assert same(run(CPU), run(DEVICE))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ensembles(prefetch: int) -> None:
    def run(device: torch.device) -> Any:
        torch.manual_seed(0)
        parts = [ReplayBuffer(storage=LazyTensorStorage(60, device=device), batch_size=8) for _ in range(2)]
        for part in parts:
            part.extend(rows(0, 40, device))
        rb = ostinato.ReplayBufferEnsemble(
            *parts, batch_size=16, num_buffer_sampled=2, p=[0.3, 0.7], prefetch=prefetch or None
        )
        return on_cpu([rb.sample(return_info=True) for _ in range(3)])

    assert same(run(CPU), run(DEVICE))


def test_an_ensemble_over_two_devices() -> None:
    parts = [ReplayBuffer(storage=LazyTensorStorage(60, device=x), batch_size=8) for x in (CPU, DEVICE)]
    for part in parts:
        part.extend(rows(0, 40, part.storage.device))
    rb = ostinato.ReplayBufferEnsemble(*parts, batch_size=16, num_buffer_sampled=2, collate_fn=list)
    batch, info = rb.sample(return_info=True)
    assert {str(part["id"].device) for part in batch} <= {"cpu", "fakegpu:0"}
    assert info["index"]["index"].is_cpu


def test_policy_versions() -> None:
    def run(device: torch.device) -> Any:
        torch.manual_seed(0)
        rb = ReplayBuffer(storage=LazyTensorStorage(60, device=device), batch_size=16, version_key="version")
        seen = []
        for first in (0, 40, 20):  # in the end versions decrease
            rb.extend(rows(first, 30, device))
            seen.append(rb.sample(max_age=1))
        return on_cpu(seen)

    assert same(run(CPU), run(DEVICE))


@pytest.mark.parametrize("endless", [False, True])
def test_a_shuffled_pass_draws_each_row_once(endless: bool) -> None:
    sampler = ostinato.SamplerWithoutReplacement(endless=endless)
    rb = ReplayBuffer(storage=LazyTensorStorage(50, device=DEVICE), sampler=sampler, batch_size=10)
    rb.extend(rows(0, 70, DEVICE))
    for _ in range(3):
        drawn = torch.cat([rb.sample()["id"] for _ in range(5)])
        assert sorted(drawn.tolist()) == list(range(20, 70))


def test_the_ring_of_isaacgymenvs() -> None:
    buffer = AmpBuffer(50, "fakegpu")
    for first in (0, 35):
        buffer.store({"id": torch.arange(first, first + 35, device=DEVICE)})
    drawn = torch.cat([buffer.sample(15)["id"] for _ in range(10)])
    assert sorted(drawn.tolist()) == sorted(3 * list(range(20, 70)))
    buffer.reset()
    buffer.store({"id": torch.arange(5, device=DEVICE)})
    assert sorted(buffer.sample(5)["id"].tolist()) == list(range(5))
    with pytest.raises(ostinato.errors.OptionError, match="field 'id' is on cpu, but this buffer is on fakegpu:0"):
        buffer.store({"id": torch.arange(5)})


class _Memory(ObjectBuffer):  # type: ignore[misc]  # as its users may: rows on another device than the two it knows
    def _get_storage(self, buffer_size: int, device: torch.device) -> Any:
        return LazyTensorStorage(buffer_size, device=device)


@pytest.mark.parametrize("training", [CPU, DEVICE])
@pytest.mark.parametrize("storing", [CPU, DEVICE])
@pytest.mark.parametrize("source", [CPU, DEVICE])
def test_the_memory_of_objectrl(
    tmp_path: Path, storing: torch.device, training: torch.device, source: torch.device
) -> None:
    buffer = _Memory(device=training, storing_device=storing, buffer_size=20)
    buffer.add_batch(TensorDict({"id": torch.arange(25, device=source)}, [25]))
    buffer.add(TensorDict({"id": torch.tensor(25, device=source)}, []))
    for batch in (
        buffer.sample_batch(8),
        buffer.sample_by_index([0, -1]),
        buffer.sample_by_index(torch.tensor([0, 3], device=source)),
        *buffer.create_epoch_iterator(6),
    ):
        assert batch["id"].device.type == training.type
    column = buffer.sample_by_index_fields(range(20), ["id"])
    assert isinstance(column, torch.Tensor)
    assert column.device.type == training.type
    assert column.tolist() == [*range(20, 26), *range(6, 20)]
    buffer.save(str(tmp_path / "buffer"))
    other = ObjectBuffer(device=CPU, storing_device=CPU, buffer_size=1)
    assert other.load(str(tmp_path / "buffer")).rows == 20
    assert other.sample_all()["id"].tolist() == column.tolist()
    buffer.buffer_size = 10
    assert sorted(buffer.sample_all()["id"].tolist()) == list(range(16, 26))


@pytest.mark.parametrize("sampler", ["RandomSampler", "PrioritizedSampler", "SliceSampler"])
def test_checkpoints_move_between_devices(tmp_path: Path, sampler: str) -> None:
    def make(device: torch.device) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(60, device=device), sampler=SAMPLERS[sampler](), batch_size=16)

    for number, (source, target) in enumerate([(DEVICE, CPU), (CPU, DEVICE), (DEVICE, DEVICE)]):
        rb, other = make(source), make(target)
        rb.extend(rows(0, 70, source))
        rb.dumps(tmp_path / str(number))
        other.loads(tmp_path / str(number))
        assert same(on_cpu(other[:]), on_cpu(rb[:]))
        assert other[:]["id"].device.type == target.type
        torch.manual_seed(3)
        one = rb.sample()
        torch.manual_seed(3)
        assert same(on_cpu(one), on_cpu(other.sample()))
        other.extend(rows(70, 5, target))


@pytest.mark.parametrize(
    "storage", [LazyTensorStorage(60), ostinato.LazyMemmapStorage(60), LazyTensorStorage(60, single_copy=True)]
)
def test_rows_of_a_device_reach_storages_on_the_cpu(storage: Any) -> None:
    rb = ostinato.PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=16)
    rb.extend(rows(0, 70, DEVICE))
    _batch, info = rb.sample(return_info=True)
    assert same(on_cpu(rb[:]["id"]).sort().values, torch.arange(10, 70))
    rb.update_priority(info["index"].to(DEVICE), torch.full((16,), 9.0, device=DEVICE))
    rb.update_priority(torch.tensor([3], device=DEVICE), [4.0])
    assert float(rb.sampler.priorities[3]) == 4.0  # type: ignore[attr-defined]
    assert same(rb[torch.tensor([1, 2], device=DEVICE)], rb[1:3])


def test_fields_that_come_late() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(60, device=DEVICE), batch_size=16)
    rb.extend(rows(0, 30, DEVICE))
    rb.write_all({**rb[:], "extra": torch.arange(30, device=DEVICE)})
    batch = rb.sample()
    assert torch.equal(batch["extra"], batch["id"])
    rb.extend({**rows(30, 5, DEVICE), "extra": torch.arange(30, 35, device=DEVICE)})
    assert rb[:]["extra"].tolist() == list(range(35))


def test_rows_written_from_the_storage_itself() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10, device=DEVICE), batch_size=4)
    rb.extend({"id": torch.arange(10, device=DEVICE)})
    rb.extend({"id": rb.storage[2:7]["id"]})  # its own memory: rows 0 to 4 take those of 2 to 6
    assert rb[:]["id"].tolist() == [2, 3, 4, 5, 6, 5, 6, 7, 8, 9]


class TestContract(StorageContract):
    """The contract of storages, over rows on the device."""

    def make(self, capacity: int) -> Any:
        return LazyTensorStorage(capacity, device="fakegpu")


@pytest.mark.parametrize("save", [False, True])
def test_trajectories(tmp_path: Path, save: bool) -> None:
    def rollout(number: int, device: torch.device) -> ostinato.Trajectory:
        serial = (torch.arange(12, device=device).reshape(6, 2, 1) + 1000 * number).float()
        flags: dict[str, Any] = {
            name: serial % n == 0 for n, name in enumerate(("dones", "terminations", "truncations"), 2)
        }
        obs = {"states": serial.repeat(1, 1, 2)}
        return ostinato.Trajectory(
            max_episode_length=6, actions=serial.repeat(1, 1, 3), rewards=serial, curr_obs=obs, next_obs=obs, **flags
        )

    def run(device: torch.device) -> Any:
        place = tmp_path / device.type
        rb = ostinato.TrajectoryReplayBuffer(seed=0, auto_save=save, auto_save_path=place)
        rb.add_trajectories([rollout(1, device), rollout(2, device)])
        other = ostinato.TrajectoryReplayBuffer(seed=0)
        rb.save_checkpoint(str(place / "saved"))
        other.load_checkpoint(str(place / "saved"))
        return on_cpu([rb.sample(4), other.sample(4)])

    assert same(run(CPU), run(DEVICE))


@pytest.mark.parametrize(("mode", "ndim"), [("NEXT_STEP", 1), ("SAME_STEP", 1), ("SAME_STEP", 2)])
def test_steps_of_environments_on_a_device(mode: str, ndim: int) -> None:
    envs = pytest.importorskip("tests.unit.collect.envs")

    def run(device: torch.device) -> Any:
        torch.manual_seed(0)
        env, actions = envs.make(3, mode), envs.actions_for(20, 3)
        rb = ReplayBuffer(storage=LazyTensorStorage(30, device=device, ndim=ndim), batch_size=8)
        steps = ostinato.VectorEnvRecorder(rb, 3, mode)
        steps.reset(torch.from_numpy(env.reset()[0]).to(device))
        index = []
        for action in actions:
            *results, info = env.step(action)
            taken, obs, gain, over, cut = [torch.from_numpy(each).to(device) for each in (action, *results)]
            index.append(steps.add_step(taken, obs, gain, over, cut, info))
        return on_cpu([index, rb[:], rb.sample()])

    assert same(run(CPU), run(DEVICE))


def test_draws_that_find_their_place_on_the_device() -> None:
    """As those that a CUDA graph replays, which do not see the host's count."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50, device=DEVICE), sampler=ostinato.SamplerWithoutReplacement(endless=True)
    )
    rb.extend({"id": torch.arange(70, device=DEVICE)})
    rb.sample(5)
    rb.sampler._passes.leave_host()  # type: ignore[attr-defined]
    with no_wait():
        parts = [rb.sample(15)["id"] for _ in range(6)] + [rb.sample(5)["id"]]
    drawn = torch.cat(parts).tolist()
    assert sorted(drawn[45:]) == list(range(20, 70))
    assert rb.sampler._passes.position == 0  # type: ignore[attr-defined]


class _Elsewhere(ostinato.RandomSampler):
    """A sampler that draws on a device of its own choice."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size,), device=self.device))


class _MovedUnit(ostinato.SampleUnit):
    """A unit that takes its slots to a device of its own choice."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def expand(self, plan: Plan, view: View, dice: torch.Tensor | None) -> Plan:
        return plan._replace(records=plan.records.to(self.device))


@pytest.mark.parametrize(("near", "far"), [(CPU, DEVICE), (DEVICE, CPU)])
def test_slots_of_own_parts_on_another_device_raise(near: torch.device, far: torch.device) -> None:
    for parts in ({"sampler": _Elsewhere(far)}, {"sample_unit": _MovedUnit(far)}):
        rb = ReplayBuffer(storage=LazyTensorStorage(60, device=near), batch_size=16, **parts)
        rb.extend(rows(0, 30, near))
        with pytest.raises(ostinato.errors.OptionError, match=f"gave slots on {far}, the rows are on {near}"):
            rb.sample()
    rb = ReplayBuffer(storage=LazyTensorStorage(60, device=near), batch_size=16, sampler=_Elsewhere(near))
    rb.extend(rows(0, 30, near))
    assert rb.sample()["id"].device == near


class _Picky(ostinato.ReservoirWriter):  # type: ignore[misc]  # a writer whose picks lie on the device
    def place(self, rows: int, ring: Ring, scores: torch.Tensor | None) -> Picks:
        found: Picks = super().place(rows, ring, scores)
        return Picks(found.slots.to(DEVICE), found.rows.to(DEVICE), found.kept.to(DEVICE))


@pytest.mark.parametrize("device", [CPU, DEVICE])
def test_picks_of_own_writers_may_lie_on_any_device(device: torch.device) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(60, device=device), batch_size=16, writer=_Picky())
    assert rb.extend(rows(0, 30, device)).tolist() == list(range(30))
    assert rb[:]["id"].tolist() == list(range(30))
    rb.extend(rows(30, 90, device))
    assert len(set(rb[:]["id"].tolist())) == 60


def test_the_device_is_one() -> None:
    """The device of these tests: it keeps values, and tells the CPU's tensors from its own."""
    x = torch.arange(4, device="fakegpu")
    assert type(x) is DeviceTensor
    assert (x + 1).cpu().tolist() == [1, 2, 3, 4]
    with pytest.raises(MixedDevicesError):
        x + torch.arange(4)
