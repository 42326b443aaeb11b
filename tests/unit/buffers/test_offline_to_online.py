"""A dataset and a growing buffer: the share of each batch, and buffers filled from a dataset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    open_dataset,
    prefill_replay_buffer,
)
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    KindError,
    OptionError,
    UsageError,
)
from ostinato.testing import ResumeContract

from ...processes import CONTEXT
from ...sharing import AVAILABLE
from ...stats.chi_square import p_value
from .refusals import raises, refuses

assert CONTEXT is not None  # its fork server has imported torch before a contract starts a process


def plain(capacity: int = 50, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity), **options)


def dataset(rows: int = 20, **options: Any) -> ReplayBuffer:
    rb = plain(max(rows, 1), **options)
    if rows:
        rb.extend({"id": torch.arange(rows)})
    return rb


def pair(online: int = 0, rows: int = 20, **options: Any) -> OfflineToOnlineReplayBuffer:
    rb = OfflineToOnlineReplayBuffer(dataset(rows), **{"online_capacity": 50, **options})
    if online:
        rb.extend({"id": torch.arange(1000, 1000 + online)})
    return rb


def ranked(rows: int = 20) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0, eps=0.0))
    if rows:
        rb.extend(TensorDict({"id": torch.arange(rows)}, [rows]))
    return rb


class Foreign:
    """A dataset of another library, which gives rows by slices alone."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def sample(self, count: int) -> TensorDict:
        return TensorDict({"id": torch.zeros(count), "index": torch.zeros(count)}, [count])

    def __getitem__(self, index: slice) -> TensorDict:
        ids = torch.arange(index.start, index.stop)
        return TensorDict({"id": ids, "index": ids}, ids.shape)


def test_the_share_of_every_batch_is_exact_and_can_be_annealed():
    rb = pair(batch_size=100, offline_fraction=0.8, source_key="source")
    assert (rb.sample()["id"] < 1000).all(), "the dataset alone while the online buffer is empty"
    assert rb.add({"id": torch.tensor(1000)}) == 0
    rb.extend({"id": torch.arange(1001, 1005)})
    assert repr(rb) == (
        "OfflineToOnlineReplayBuffer(offline=ReplayBuffer, offline_size=20, offline_fraction=0.800, online_size=5, "
        "batch_size=100)"
    )
    for step, count in ((0, 80), (5, 40), (9, 8), (10, 0), (11, 0), (0, 80)):
        rb.anneal(step, 10)
        batch = rb.sample()
        assert (batch["id"] >= 1000).long().tolist() == batch["source"].tolist() == [0] * count + [1] * (100 - count)
    rb.empty()
    assert (rb.sample()["id"] < 1000).all()
    assert len(rb.offline_buffer) == len(rb) == 20


def test_lists_and_transforms():
    rb = OfflineToOnlineReplayBuffer(
        dataset(), online_storage=ListStorage(9), batch_size=4, transform=lambda batch: {"twice": batch["id"] * 2}
    )
    assert rb.extend([{"id": row} for row in torch.arange(1000, 1012)]).shape == (12,)
    assert (len(rb), len(rb.online_buffer), rb.batch_size) == (29, 9, 4)
    for batch, _ in zip(rb, range(2), strict=False):
        assert (batch["twice"] >= 2000).tolist() == [False, False, True, True]
    assert len(rb.transform.steps) == 1


def test_samples_carry_no_index_unless_it_is_a_field_or_priorities_are_kept():
    offline, named = TensorDictReplayBuffer(storage=LazyTensorStorage(9)), plain(9)
    offline.extend(TensorDict({"id": torch.arange(9)}, [9]))
    named.extend(TensorDict({"index": torch.arange(9)}, [9]))
    assert "index" in OfflineToOnlineReplayBuffer(named, online_capacity=9).sample(3)
    for data, names in ((offline, ["id"]), (ranked(), ["id", "index", "index_generation", "priority_weight"])):
        rb = OfflineToOnlineReplayBuffer(data, online_capacity=9, batch_size=4)
        rb.extend(TensorDict({"id": torch.arange(3)}, [3]))
        batch = rb.sample()
        assert (batch.batch_size, sorted(map(str, batch.keys()))) == ((4,), names)
    assert bool((batch["priority_weight"][2:] == 1).all())


# -- checkpoints ------------------------------------------------------------------------------------------------------


class TestResume(ResumeContract):
    """With the state of the dataset's sampler, and the share that is carried from batch to batch."""

    def make(self, capacity: int) -> Any:
        return OfflineToOnlineReplayBuffer(
            ranked(),
            online_buffer=TensorDictReplayBuffer(storage=LazyTensorStorage(capacity)),
            offline_fraction=0.3,
            batch_size=5,
            rounding="carry",
            generator=torch.Generator().manual_seed(3),
        )

    def rows(self, count: int, start: int) -> Any:
        return TensorDict({"id": torch.arange(1000 + start, 1000 + start + count)}, [count])

    def use(self, buffer: Any) -> Any:
        batch = buffer.sample()
        batch["td_error"] = batch["id"] % 7
        buffer.update_tensordict_priority(batch)
        return batch["id"], batch["priority_weight"]


def test_a_checkpoint_is_one_of_the_online_buffer_with_more(tmp_path):
    rb, again, alone = pair(5, batch_size=4), pair(batch_size=4), plain()
    rb.anneal(1, 2)
    rb.dumps(tmp_path / "saved")
    alone.loads(tmp_path / "saved")
    assert alone["id"].tolist() == list(range(1000, 1005))
    again.loads(tmp_path / "saved")
    assert (again.offline_fraction, len(again)) == (0.25, 25)
    alone.dumps(tmp_path / "alone")
    for other, name, words in ((again, "alone", "online_buffer.loads"), (pair(2, 7), "saved", "20, this one has 7")):
        before = other.online_buffer["id"].tolist()
        with pytest.raises(CheckpointError, match=words):
            other.loads(tmp_path / name)
        assert other.online_buffer["id"].tolist() == before


@pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")
def test_the_share_of_a_dataset_that_draws_by_itself_goes_on(tmp_path):
    """Such a dataset goes with an online buffer of several processes: a mixture would belong to one."""
    rb, again = (
        OfflineToOnlineReplayBuffer(
            Foreign(10), online_buffer=plain(shared=True), offline_fraction=share, rounding="carry"
        )
        for share in (0.3, 0.5)
    )
    rb.extend(TensorDict({"id": torch.arange(1000, 1005)}, [5]))
    first = [int((rb.sample(5)["id"] == 0).sum()) for _ in range(3)]
    rb.dumps(tmp_path / "saved")
    again.loads(tmp_path / "saved")
    assert (again.offline_fraction, again.online_buffer["id"].tolist()) == (0.3, list(range(1000, 1005)))
    for one in (rb, again):
        assert [*first, *(int((one.sample(5)["id"] == 0).sum()) for _ in range(2))] == [2, 1, 2, 1, 2]


def test_states_that_do_not_fit_change_nothing():
    def of_episodes(length: int) -> OfflineToOnlineReplayBuffer:
        storage = open_dataset({"id": torch.arange(20)}, episode_ends=list(range(length, 21, length)))
        return OfflineToOnlineReplayBuffer(storage, online_capacity=5, batch_size=4)

    rb, good = pair(online=3), pair(online=5).state_dict()
    mixture = good["offline"]
    states = [
        {},
        rb.online_buffer.state_dict(),
        {"offline": mixture},
        {**good, "storage": {}},
        pair(rounding="carry").state_dict(),
        {**good, "offline": {**mixture, "draws": {**mixture["draws"], "rows": 3}}},
    ]
    for state in states:
        with pytest.raises(CheckpointError):
            rb.load_state_dict(state)
    assert (len(rb.online_buffer), rb.offline_fraction) == (3, 0.5)
    of_episodes(5).load_state_dict(of_episodes(5).state_dict())
    with pytest.raises(CheckpointError):
        of_episodes(5).load_state_dict(of_episodes(10).state_dict())


# -- what raises ------------------------------------------------------------------------------------------------------


def test_datasets_that_draw_by_themselves():
    rb = OfflineToOnlineReplayBuffer(Foreign(10), online_capacity=5, source_key="source", rounding="carry")
    rb.extend(TensorDict({"id": torch.ones(3)}, [3]))
    batch = rb.sample(4)
    assert batch["source"].tolist() == batch["id"].tolist() == [0, 0, 1, 1]
    raises(
        (lambda: rb.sample(4, return_info=True), UsageError, "draws by itself"),
        (lambda: rb.update_priority([0], 1.0), UsageError, "draws by itself"),
    )
    limited = dataset(5, consume_after_n_samples=10)
    assert (OfflineToOnlineReplayBuffer(limited, online_capacity=5).sample(4)["id"] < 5).all()
    filled = prefill_replay_buffer(plain(), Foreign(10), chunk_size=4)
    assert filled["id"].tolist() == list(range(10))
    assert list(filled[:].keys()) == ["id"]


def test_refused_options():
    """Those of TorchRL: `tests/parity/test_ensembles.py`."""
    both, limited = OfflineToOnlineReplayBuffer, dataset(5, consume_after_n_samples=1)
    lanes = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    refuses(
        {
            OptionError: {
                "neither with online_buffer": lambda: pair(online_buffer=dataset()),
                "generator": lambda: both(Foreign(1), online_capacity=5, generator=torch.Generator()),
                "belong to one process": lambda: both(dataset(), online_buffer=plain(shared=True)),
                "anneal": (
                    lambda: pair().anneal(-1, 10),
                    lambda: pair().anneal(0, 0),
                ),
                "chunk_size": lambda: prefill_replay_buffer(dataset(), dataset(), chunk_size=0),
                "n_samples": lambda: prefill_replay_buffer(dataset(), dataset(), n_samples=-1),
                "leave as they are drawn": lambda: prefill_replay_buffer(dataset(0), limited),
                "the buffer itself": lambda: prefill_replay_buffer(limited, limited),
                "ndim=2": lambda: prefill_replay_buffer(dataset(), lanes),
            },
            KindError: {
                "got Foreign": lambda: both(dataset(), online_buffer=Foreign(3)),  # type: ignore[arg-type]
                "got list": lambda: both([1, 2], online_capacity=3),
                "got object": lambda: prefill_replay_buffer(dataset(), object()),
                "rb must be a replay buffer": lambda: prefill_replay_buffer(3, dataset()),  # type: ignore[arg-type]
            },
            UsageError: {
                "Batch_size was not specified": lambda: next(iter(pair())),
            },
            EmptyBufferError: {
                "empty": lambda: pair(rows=0).sample(3),
            },
        }
    )


# -- filling a buffer ------------------------------------------------------------------------------------------------


def test_some_rows_are_drawn_uniformly_and_each_once():
    torch.manual_seed(0)
    source = dataset(transform=lambda batch: {"id": batch["id"] + 100})
    counts = torch.zeros(20)
    for _ in range(100):
        rb = plain()
        rb.append_transform(lambda batch: {"id": batch["id"] - 100}, invert=True)  # those of both run
        ids = prefill_replay_buffer(rb, source, n_samples=5, chunk_size=3).storage[:]["id"]
        assert len(ids) == len(set(ids.tolist())) == 5
        counts += torch.bincount(ids, minlength=20)
    assert p_value(counts.int().tolist()) > 1e-4
    for rows, copied in ((99, 20), (0, 0)):
        assert len(prefill_replay_buffer(plain(), source, rows)) == copied


def test_lists_files_and_empty_datasets():
    source, rb = (ReplayBuffer(storage=ListStorage(9), collate_fn=list) for _ in range(2))
    source.extend(["a", "b", "c"])
    assert prefill_replay_buffer(rb, source, chunk_size=2)[:] == ["a", "b", "c"]
    files = open_dataset({"id": torch.arange(20)}, episode_ends=[8, 20])
    assert prefill_replay_buffer(plain(), files, chunk_size=7)["id"].tolist() == list(range(20))
    assert len(prefill_replay_buffer(plain(), dataset(0))) == 0


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_a_full_ring_is_copied_from_its_oldest_row_on(chunk):
    source, rb, some = dataset(10), plain(), plain()
    source.extend({"id": torch.arange(10, 14)})
    assert prefill_replay_buffer(rb, source, chunk_size=chunk) is rb
    assert rb["id"].tolist() == list(range(4, 14))
    prefill_replay_buffer(some, source, 6, chunk_size=chunk)
    assert bool((some["id"].diff() > 0).all())
    assert len(some) == 6
