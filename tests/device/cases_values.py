"""A buffer on a device gives what the same buffer gives on the CPU: every part that draws, reads or writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

import ostinato
from ostinato import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from ostinato.compat.isaacgymenvs import ReplayBuffer as AmpBuffer
from ostinato.compat.objectrl import ReplayBuffer as ObjectBuffer
from ostinato.core.records import Draw
from ostinato.testing import StorageContract
from tests import registry
from tests.device.place import DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostinato.core.records import View

CPU = torch.device("cpu")
LEFT_OUT: tuple[str, ...] = (
    "Stack",
    "Heap",
    "Consuming",
    "Streaming",
    "Prompt",
    "Staleness",
    "RandomSampler, each once",
)
LEFT_OUT += ("SamplerWithoutReplacement", "SliceSamplerWithoutReplacement")
"""Samplers that keep their account on the host, or shuffle in another way on a device."""


@pytest.fixture(autouse=True)
def own_chance() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def rows(first: int, count: int, device: torch.device) -> dict[str, Any]:
    """Rows of episodes, numbered, as a dict on a device."""

    def moved(value: Any) -> Any:
        return {k: moved(v) for k, v in value.items()} if isinstance(value, dict) else value.to(device)

    made = registry.rows(count, first).to_dict()
    return moved({**made, "id": made["t"], "version": made["t"] // 10})  # type: ignore[no-any-return]


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


PARTS: dict[str, Any] = {
    **{
        name: {"sampler": name}
        for name in registry.SAMPLERS
        if name.endswith("in order") or not name.startswith(LEFT_OUT)
    },
    **{name: {"sample_unit": name} for name in registry.UNITS if name not in {"none", "Transition"}},
    "NStep, prioritized": {"sample_unit": "NStep", "sampler": "PrioritizedSampler"},
    "ReservoirWriter": {"writer": "ReservoirWriter"},
    "TensorDictMaxValueWriter": {"writer": "TensorDictMaxValueWriter", "sampler": "PrioritizedSampler"},
}


def make(device: Any, parts: dict[str, Any], **options: Any) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(60, device=device, **options)
    return registry.make(60, storage=storage, batch_size=15, **{"generator": None, **parts})


def script(rb: Any, device: torch.device, size: int = 15) -> list[Any]:
    """Write, draw, edit and learn; return everything that came back."""
    seen: list[Any] = []

    def some(first: int, count: int) -> Any:
        return TensorDict(rows(first, count, device), [count], device=device)

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
    return seen


def run_on_both(run: Callable[[torch.device], list[Any]]) -> None:
    found = []
    for device in (CPU, DEVICE):
        torch.manual_seed(0)
        found.append(map(on_cpu, run(device)))
    for step, (one, other) in enumerate(zip(*found, strict=True)):
        assert same(one, other), f"step {step}: {one} on the CPU, {other} on the device"


def test_the_ring_of_isaacgymenvs():
    buffer = AmpBuffer(50, DEVICE)
    for first in (0, 35):
        buffer.store({"id": torch.arange(first, first + 35, device=DEVICE)})
    drawn = torch.cat([buffer.sample(15)["id"] for _ in range(10)])
    assert sorted(drawn.tolist()) == sorted(3 * list(range(20, 70)))
    buffer.reset()
    buffer.store({"id": torch.arange(5, device=DEVICE)})
    assert sorted(buffer.sample(5)["id"].tolist()) == list(range(5))
    with pytest.raises(ostinato.errors.OptionError, match=f"field 'id' is on cpu, but this buffer is on {DEVICE}"):
        buffer.store({"id": torch.arange(5)})


class _Memory(ObjectBuffer):  # type: ignore[misc]  # as its users may: rows on another device than the two it knows
    def _get_storage(self, buffer_size: int, device: torch.device) -> Any:
        return LazyTensorStorage(buffer_size, device=device)


class TestContract(StorageContract):
    """The contract of storages, over rows on the device."""

    def make(self, capacity: int) -> Any:
        return LazyTensorStorage(capacity, device=DEVICE)


@pytest.mark.parametrize(("mode", "ndim"), [("NEXT_STEP", 1), ("SAME_STEP", 2)])
def test_steps_of_environments_on_a_device(mode, ndim):
    envs = pytest.importorskip("tests.unit.collect.envs")

    def run(device: torch.device) -> Any:
        env, actions = envs.make(3, mode), envs.actions_for(20, 3)
        rb = ReplayBuffer(storage=LazyTensorStorage(30, device=device, ndim=ndim), batch_size=8)
        steps = ostinato.VectorEnvRecorder(rb, 3, mode)
        steps.reset(torch.from_numpy(env.reset()[0]).to(device))
        index = []
        for action in actions:
            *results, info = env.step(action)
            taken, obs, gain, over, cut = [torch.from_numpy(each).to(device) for each in (action, *results)]
            index.append(steps.add_step(taken, obs, gain, over, cut, info))
        return [index, rb[:], rb.sample()]

    run_on_both(run)


class _Elsewhere(ostinato.RandomSampler):
    """A sampler that draws on a device of its own choice."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        return Draw(torch.randint(0, view.rows, (batch_size,), device=self.device))


SINGLE = ("RandomSampler", "PrioritizedSampler", "SliceSampler", "NStep", "FrameStack", "SequenceUnit, strict")


@pytest.mark.parametrize(("parts", "single"), [*((part, False) for part in PARTS), *((part, True) for part in SINGLE)])
def test_parts(parts, single):
    run_on_both(lambda device: script(make(device, PARTS[parts], single_copy=single), device))


def test_plain_rows_on_the_device_of_the_first_ones():
    def run(device: torch.device) -> Any:
        rb = ReplayBuffer(storage=LazyTensorStorage(60, device="auto"), batch_size=16)
        rb.extend(rows(0, 90, device))
        rb.add(_first(rows(90, 1, device)))
        return [rb.sample(), rb[:]]

    run_on_both(run)


def _first(value: Any) -> Any:
    return {key: _first(each) for key, each in value.items()} if isinstance(value, dict) else value[0]


def test_samples_moved_to_the_cpu_and_to_the_device():
    def sample(here: torch.device, there: str) -> Any:
        torch.manual_seed(0)
        storage = LazyTensorStorage(60, device=here)
        rb = ReplayBuffer(storage=storage, batch_size=16, transform=ostinato.ToDevice(there))
        data = rows(0, 30, here)
        rb.extend({"id": data["id"], "obs": data["obs"]})
        return rb.sample()

    one = {key: value.clone() for key, value in sample(DEVICE, "cpu").items()}  # before anything else waits
    other = sample(CPU, DEVICE.type)
    assert (places(one), places(other)) == ({"cpu"}, {DEVICE.type})
    assert same(one, on_cpu(other))


def test_two_dimensions():
    def run(device: torch.device) -> Any:
        rb = make(device, {"sampler": "PrioritizedSampler"}, ndim=2)
        seen: list[Any] = []
        for first in range(0, 18, 6):
            seen += [rb.extend(TensorDict({"t": rows(first, 30, device)["t"].view(6, 5)}, [6, 5], device=device))]
            seen += [rb.sample()]
        rb.update_priority(seen[-1]["index"], torch.ones(15, device=device, dtype=torch.float32))
        return [*seen, rb[2], rb[:, 1], rb[2, 3], rb.sample()]

    run_on_both(run)


def test_ensembles():
    def run(device: torch.device) -> Any:
        parts = [ReplayBuffer(storage=LazyTensorStorage(60, device=device), batch_size=8) for _ in range(2)]
        for part in parts:
            part.extend(rows(0, 40, device))
        rb = ostinato.ReplayBufferEnsemble(*parts, batch_size=16, num_buffer_sampled=2, p=[0.3, 0.7], prefetch=2)
        return [rb.sample(return_info=True) for _ in range(3)]

    run_on_both(run)


def test_an_ensemble_over_two_devices():
    parts = [ReplayBuffer(storage=LazyTensorStorage(60, device=x), batch_size=8) for x in (CPU, DEVICE)]
    for part in parts:
        part.extend(rows(0, 40, part.storage.device))
    rb = ostinato.ReplayBufferEnsemble(*parts, batch_size=16, num_buffer_sampled=2, collate_fn=list)
    assert rb.sample(return_info=True)[1]["index"]["index"].is_cpu


def test_ages_of_policy_versions():
    def run(device: torch.device) -> Any:
        rb = ReplayBuffer(storage=LazyTensorStorage(60, device=device), batch_size=16, version_key="version")
        seen = []
        for first in (0, 40, 20):  # in the end versions decrease
            rb.extend(rows(first, 30, device))
            seen.append(rb.sample(max_age=1))
        return seen

    run_on_both(run)


@pytest.mark.parametrize(
    ("source", "storing", "training"), [(CPU, DEVICE, DEVICE), (DEVICE, CPU, DEVICE), (DEVICE, DEVICE, CPU)]
)
def test_the_memory_of_objectrl(tmp_path, source, storing, training):
    buffer = _Memory(device=training, storing_device=storing, buffer_size=20)
    buffer.add_batch(TensorDict({"id": torch.arange(25, device=source)}, [25]))
    buffer.add(TensorDict({"id": torch.tensor(25, device=source)}, []))
    column = buffer.sample_by_index_fields(range(20), ["id"])
    by_index = buffer.sample_by_index(torch.tensor([0, 3], device=source))
    for batch in (buffer.sample_batch(8), by_index, *buffer.create_epoch_iterator(6), {"id": column}):
        assert batch["id"].device.type == training.type
    assert column.tolist() == [*range(20, 26), *range(6, 20)]  # type: ignore[union-attr]
    buffer.save(str(tmp_path / "buffer"))
    other = ObjectBuffer(device=CPU, storing_device=CPU, buffer_size=1)
    other.load(str(tmp_path / "buffer"))
    assert other.sample_all()["id"].tolist() == column.tolist()  # type: ignore[union-attr]


def test_checkpoints_move_between_devices(tmp_path):
    for number, (source, target) in enumerate([(DEVICE, CPU), (CPU, DEVICE), (DEVICE, DEVICE)]):
        rb, other = (
            ReplayBuffer(
                storage=LazyTensorStorage(60, device=device),
                sampler=registry.SAMPLERS["PrioritizedSampler"].make(60),
                batch_size=16,
            )
            for device in (source, target)
        )
        rb.extend(rows(0, 70, source))
        rb.dumps(tmp_path / str(number))
        other.loads(tmp_path / str(number))
        assert same(on_cpu(other[:]), on_cpu(rb[:]))
        assert other[:]["id"].device.type == target.type
        batches = []
        for buffer in (rb, other):
            torch.manual_seed(3)
            batches.append(on_cpu(buffer.sample()))
        assert same(*batches)


def test_rows_of_a_device_reach_storages_on_the_cpu():
    for storage in (LazyTensorStorage(60), ostinato.LazyMemmapStorage(60), LazyTensorStorage(60, single_copy=True)):
        rb = ReplayBuffer(storage=storage, sampler=registry.SAMPLERS["PrioritizedSampler"].make(60), batch_size=16)
        rb.extend(rows(0, 70, DEVICE))
        _batch, info = rb.sample(return_info=True)
        assert sorted(rb[:]["id"].tolist()) == list(range(10, 70))
        rb.update_priority(info["index"].to(DEVICE), torch.full((16,), 9.0, device=DEVICE))
        rb.update_priority(torch.tensor([3], device=DEVICE), [4.0])
        assert float(rb.sampler.priorities[3]) == 4.0  # type: ignore[attr-defined]
        assert same(rb[torch.tensor([1, 2], device=DEVICE)], rb[1:3])


def test_late_fields_and_rows_of_the_storage_itself():
    rb = ReplayBuffer(storage=LazyTensorStorage(10, device=DEVICE), batch_size=4)
    rb.extend({"id": torch.arange(10, device=DEVICE)})
    rb.extend({"id": rb.storage[2:7]["id"]})  # its own memory: rows 0 to 4 take those of 2 to 6
    assert rb[:]["id"].tolist() == [2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    rb.write_all({**rb[:], "extra": torch.arange(10, device=DEVICE)})
    assert rb[:]["extra"].tolist() == list(range(10))


@pytest.mark.parametrize(("near", "far"), [(CPU, DEVICE), (DEVICE, CPU)])
def test_slots_of_own_samplers_on_another_device_raise(near, far):
    for device in (near, far):
        storage = LazyTensorStorage(60, device=near)
        rb = ReplayBuffer(storage=storage, batch_size=16, sampler=_Elsewhere(device))
        rb.extend(rows(0, 30, near))
        if device == near:
            assert rb.sample()["id"].device == near
            continue
        with pytest.raises(ostinato.errors.OptionError, match=f"gave slots on {far}, the rows are on {near}"):
            rb.sample()
