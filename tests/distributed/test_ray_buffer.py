"""A buffer in an actor does what the same local buffer does."""

from __future__ import annotations

import inspect
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    RayReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    RowValues,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from ostinato.buffers.portion import reseed
from ostinato.buffers.updates import ConditionalUpdateResult
from ostinato.errors import (
    EmptyBufferError,
    KindError,
    LostBufferError,
    OptionError,
    UsageError,
)
from ostinato.transforms import Cast

from ..tags import same_kind
from ..unit.buffers.refusals import raises

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

STORAGE = partial(LazyTensorStorage, 100)


def local(sampler: Any = RandomSampler, seed: int = 3) -> ReplayBuffer:
    """Return what `remote` holds, with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return ReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=8, generator=generator)


def rows(n: int, first: int = 0, width: int = 3) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n), "y": torch.rand(n, width)}


def members(cls: type) -> set[str]:
    own = {"__len__", "__bool__", "__iter__", "__getitem__", "__setitem__", "__repr__", "__getstate__", "__setstate__"}
    return {name for name in dir(cls) if not name.startswith("_")} | (own & set(dir(cls)))


def test_a_handle_has_every_public_name_of_a_buffer():
    words = members(ReplayBuffer) | {"update_tensordict_priority", "priority_key"}
    assert words - members(RayReplayBuffer) == set()
    assert members(RayReplayBuffer) - words == {"actor", "apply", "attach", "clients", "transport_kind"}
    for name in words:
        mine = getattr(TensorDictReplayBuffer, name)
        if inspect.isfunction(mine):
            other = list(inspect.signature(getattr(RayReplayBuffer, name)).parameters)
            names = list(inspect.signature(mine).parameters)
            if "timeout_s" not in names and "timeout_s" in other:
                other.remove("timeout_s")  # calls of an actor have a deadline
            assert other == names, name


def test_an_observer_follows_the_rows_in_the_actor(remote):
    rb = remote()
    rb.observe(RowValues("weight", 2.0))
    rb.extend(rows(3))
    assert rb.apply(lambda mine: mine._engine.view().values["weight"][:3].tolist()) == [2.0] * 3


# -- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefetch", "width"), [(0, 3), (4, 3), (4, 10_000)])
def test_draws_are_those_of_a_local_buffer(remote, prefetch, width):
    mine, rb = local(), remote(prefetch=prefetch)
    data, drawn, written = rows(60, width=width), rb.stats().rows_drawn, rb.write_count
    assert torch.equal(mine.extend(data), rb.extend(data))
    row = {"x": torch.tensor(7), "y": torch.zeros(width)}
    assert mine.add(row) == rb.add(row)
    for _ in range(9):
        batch, info = rb.sample(return_info=True)
        expected, named = mine.sample(return_info=True)
        assert type(batch) is dict
        assert all(torch.equal(batch[key], expected[key]) for key in expected)
        assert torch.equal(info["index"], named["index"])
    assert len(rb) == len(mine) == 61
    assert rb.write_count - written == 61
    assert rb.stats().rows_drawn - drawn >= 72
    assert (rb.batch_size, rb.dim_extend) == (8, 0)
    assert "LazyTensorStorage" in repr(rb)
    again, info = rb.sample(return_info=True, out=batch)
    assert again is batch
    assert torch.equal(batch["y"], rb[info["index"]]["y"])
    batch["y"].zero_()
    assert rb.extend({"x": torch.tensor(i), "y": torch.ones(width)} for i in range(3)).tolist() == [61, 62, 63]
    assert float(rb[:]["y"][info["index"]].sum()) > 0, "a batch may be modified"


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_has_each_row_once_and_ends(remote, prefetch):
    rb = remote(sampler=SamplerWithoutReplacement, prefetch=prefetch)
    rb.extend(rows(14))
    for _ in range(2):
        batches = [batch["x"].tolist() for batch in rb]
        assert [len(batch) for batch in batches] == [8, 6]
        assert sorted(x for batch in batches for x in batch) == list(range(14))
    assert len(next(iter(rb))["x"]) == 8, "an iteration may be left early"
    for _ in range(2):
        assert [None if batch is None else len(batch["x"]) for batch in (rb.next(), rb.next(), rb.next())] == [
            8,
            6,
            None,
        ]


def test_prefetch_continues_after_an_error(remote):
    rb = remote(prefetch=2)
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(rows(10))
    assert len(rb.sample()["x"]) == 8
    rb.empty()
    rb.extend(rows(10, first=50))
    assert int(rb.sample()["x"].min()) >= 50, "batches made ahead go with the rows"
    drawn = []
    for _ in range(2):
        rb.sample()
        rb.set_rng(torch.Generator().manual_seed(3))
        drawn.append([rb.sample()["x"].tolist() for _ in range(3)])
    assert drawn[0] == drawn[1], "and with the generator"
    for asked in ({"timeout_s": 1.0}, {"max_age": 1}, {"min_batch": 1}):
        with pytest.raises((UsageError, OptionError), match=r"do not apply to batches that were requested|prefetch"):
            rb.sample(**asked)


@pytest.mark.parametrize(("prefetch", "ahead"), [(1, {1}), (5, {4, 5}), (8, {5, 6, 7, 8})])
def test_batches_are_drawn_ahead_as_the_first_one_comes(cluster, remote, prefetch, ahead):
    """The next ones are made and sent while the learner is busy, half of them with each request, and never more."""
    rb = remote(prefetch=prefetch)
    rb.extend(rows(10))
    before, found, sizes = rb.stats().rows_drawn, set(), set()
    for taken in range(1, 14):
        rb.sample()
        requests = [one.made for one in rb._batches.queue.requests]
        coming = [reference for call in requests for reference in call]
        ready, _ = cluster.wait(coming, num_returns=len(coming), timeout=60)
        assert len(ready) == len(coming)
        found.add((rb.stats().rows_drawn - before) // 8 - taken)
        sizes |= {len(call) for call in requests}
    assert found == ahead
    assert sizes == {max(1, prefetch // 2)}


# -- rows and priorities ----------------------------------------------------------------------------------------------


def tensordict(n: int, **fields: Any) -> TensorDict:
    return TensorDict(fields or {"x": torch.arange(n), "y": torch.zeros(n, 3)}, [n])


FIRST = torch.arange(6)
PATCH = tensordict(6, x=torch.full((6,), 7))
ERRORS = tensordict(6, index=FIRST, td_error=torch.full((6,), 50.0))
LOSSES = TensorDict({"index": FIRST, "agent": {"loss": torch.full((6,), 3.0)}}, [6])
CALLS: list[Any] = [
    ("can_sample",),
    ("extend", tensordict(10)),
    ("add", tensordict(1)[0]),
    ("can_sample",),
    ("sample", None, True),
    ("update_priority", torch.arange(11), torch.arange(11.0)),
    ("sample", 3),
    ("update_tensordict_priority", ERRORS),
    ("sample",),
    ("update_if_present", {"index": FIRST, "generation": FIRST - FIRST % 2, "patch": PATCH}),
    ("__getitem__", slice(None)),
    ("extend", tensordict(3, z=torch.zeros(3))),
    ("update_priority", [0, 1], [1.0, -1.0]),
    ("__getitem__", 99),
    ("__getitem__", "y"),
    ("__setitem__", slice(0, 2), tensordict(2, x=torch.tensor([70, 71]), y=torch.ones(2, 3))),
    ("set_at_", "x", torch.tensor([72]), [2]),
    ("read_all_in_order", 4),
    ("set_", "x", torch.arange(11) * 2),
    ("update_", {"y": torch.ones(11, 3)}),
    ("write_all", tensordict(1), 1),
    ("__getitem__", slice(None)),
    ("mark_update", 0),
    ("delete", FIRST, FIRST - FIRST % 2),
    ("__len__",),
    ("check",),
    ("read_episodes",),
    ("episodes",),
    ("priority_key",),
    ("extend", tensordict(100)),
    ("update_priority", FIRST, torch.ones(6), FIRST),
    ("cursor",),
    ("empty", False),
    ("write_count",),
    ("__len__",),
]


def _call(rb: Any, name: str, *args: Any) -> Any:
    """Return what a call returns or raises, or the value of a property."""
    options = args[0] if args and isinstance(args[0], dict) and name == "update_if_present" else None
    try:
        found = getattr(rb, name)
        found = found(**options) if options else found(*args) if callable(found) else found
    except Exception as error:
        return type(error), str(error)
    return "itself" if found is rb else vars(found) if isinstance(found, ConditionalUpdateResult) else found


def test_calls_do_what_they_do_in_a_local_buffer(cluster):
    options: dict[str, Any] = {"sampler": partial(PrioritizedSampler, 100, 1.0, 0.5), "batch_size": 8}
    options |= {"storage": STORAGE, "writer": partial(RoundRobinWriter, track_generations=True)}
    mine = TensorDictReplayBuffer(**options)
    with RayReplayBuffer(replay_buffer_cls=TensorDictReplayBuffer, remote_config={"num_cpus": 0}, **options) as rb:
        reseed(mine, 3)
        rb.apply(reseed, 3)
        for name, *args in CALLS:
            same_kind(_call(rb, name, *args), _call(mine, name, *args), f"{name}{args}")
        assert rb.stats().stale_updates == mine.stats().stale_updates > 0
        rb.extend(tensordict(10))
        rb.priority_key = ("agent", "loss")
        rb.update_tensordict_priority(LOSSES)
        assert rb.priority_key == ("agent", "loss")
        assert rb.apply(lambda buffer: buffer.sampler.priorities)[:6].tolist() == [3.0] * 6


def test_parts_stay_in_the_actor_and_can_be_replaced(remote):
    rb = remote()
    for name in ("storage", "sampler", "writer", "transform", "sample_unit"):
        with pytest.raises(UsageError, match=rf"rb\.apply\(lambda rb: \.\.\. rb\.{name}"):
            getattr(rb, name)
    rb.extend(rows(10))
    assert isinstance(rb.set_sampler(PrioritizedSampler(1000, 1.0, 1.0)), RandomSampler)
    rb.apply(lambda buffer, beta: setattr(buffer.sampler, "beta", beta), 0.75)
    assert rb.apply(lambda buffer: buffer.sampler.beta) == 0.75
    assert "priority_weight" in rb.sample(return_info=True)[1]
    assert rb.append_transform(Cast(torch.float32, "x")) is rb
    assert rb.sample()["x"].dtype is torch.float32
    rb.insert_transform(0, lambda batch: {**batch, "x": batch["x"] + 1000})
    assert float(rb.sample()["x"].min()) >= 1000
    before = rb.set_storage(LazyTensorStorage(50))
    assert (len(before), len(rb)) == (10, 0)
    assert isinstance(rb.set_writer(RoundRobinWriter()), RoundRobinWriter)


def test_checkpoints_are_those_of_local_buffers(remote, tmp_path):
    rb, mine, calls = remote(), local(), list[tuple[int, int]]()

    def told(done: int, total: int) -> None:
        calls.append((done, total))

    rb.set_writer(RoundRobinWriter())
    rb.extend(rows(60))
    rb.sample()
    rb.dumps(tmp_path / "saved", progress=told)
    mine.loads(tmp_path / "saved")
    expected = [mine.sample()["x"] for _ in range(3)]
    state = rb.state_dict()
    for load in (partial(rb.loads, tmp_path / "saved", progress=told), partial(rb.load_state_dict, state)):
        rb.empty()
        load()
        assert all(torch.equal(rb.sample()["x"], one) for one in expected)
    assert calls == [(0, 1), (1, 1)] * 2
    rb.register_save_hook(_negate)
    rb.register_load_hook(_negate)
    rb.dumps(tmp_path / "saved")
    rb.loads(tmp_path / "saved", verify=False)
    assert rb[:]["x"].tolist() == list(range(60)), "hooks run in the actor"


def _negate(data: Any, **_: Any) -> Any:
    return {**data, "x": -data["x"]}


# -- the life of a handle ---------------------------------------------------------------------------------------------


def test_invalid_options_and_calls_raise(cluster):
    """Torch seeds every process alike; the seed of a buffer in an actor comes from the process that makes it."""
    refused: list[Any] = [
        ({"remote_config": {"max_restarts": 2}}, OptionError, "max_restarts"),
        ({"remote_config": {"concurrency_groups": {}}}, OptionError, "concurrency_groups"),
        ({"prefetch": 2}, OptionError, "batch-size must be specified in advance"),
        ({"storage": 7}, KindError, "storage must be an instance of"),
        ({"replay_buffer_cls": ReplayBufferEnsemble}, OptionError, "subclass of it, got ReplayBufferEnsemble"),
    ]
    for options, error, words in refused:
        given = (ReplayBuffer(storage=STORAGE()),) if "replay_buffer_cls" in options else ()
        with pytest.raises(error, match=words):
            RayReplayBuffer(*given, **options)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="ray_init_config"):
        handle = RayReplayBuffer(
            replay_buffer_cls=partial(PrioritizedReplayBuffer, alpha=1.0, beta=1.0),
            storage=STORAGE,
            ray_init_config={"num_cpus": 1},
        )
    torch.manual_seed(1)
    mine = local(partial(PrioritizedSampler, 1000, 1.0, 1.0), seed=int(torch.randint(2**62, ())))
    torch.set_rng_state(state)
    for buffer in (handle, mine):
        buffer.extend({"x": torch.arange(100)})
    assert torch.equal(handle.sample(32)["x"], mine.sample(32)["x"])
    other = pickle.loads(pickle.dumps(handle))
    raises(
        (handle.sample, UsageError, "batch_size not specified"),
        (lambda: next(iter(handle)), UsageError, "Cannot iterate"),
        (lambda: handle.priority_key, UsageError, "priority_key is of a TensorDictReplayBuffer"),
        (lambda: handle.update_tensordict_priority({}), UsageError, r"update_tensordict_priority\(\) is of a Tensor"),
    )
    with handle as same:
        assert same is handle
    for call in (lambda: len(other), lambda: handle.extend({"x": torch.arange(3)})):
        with pytest.raises(LostBufferError, match=r"was closed, by close\(\)|is gone, and its rows with it"):
            call()
    handle.close()
