"""`load_dataset`: rows, ends of episodes and errors, beside plain NumPy models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    RaggedTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    open_dataset,
)
from ostinato.errors import CapacityError, OptionError, OstinatoError, SchemaError, UsageError

from .builders import last_rows


def mapping(lengths: list[int], *, flags: str = "", seed: int = 0) -> dict[str, Any]:
    """Rows that hold their own number, with flags of a kind."""
    rows, last = sum(lengths), last_rows(lengths)
    data: dict[str, Any] = {
        "observation": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3),
        "row": np.arange(rows),
    }
    stops = last & (np.random.default_rng(seed).random(rows) < 0.5)
    if flags == "next":
        data["next"] = {"terminated": stops, "truncated": last & ~stops, "done": last, "reward": np.ones(rows)}
    elif flags == "terminated":
        data["terminated"] = stops
    return data | {"episode_ends": np.cumsum(lengths)}


def buffer(**options: Any) -> ReplayBuffer:
    return ReplayBuffer(**{"storage": LazyTensorStorage(500), "batch_size": 8, **options})


@pytest.mark.parametrize("seed", range(9))
def test_any_selection_in_any_chunks_gets_flags_where_it_cuts(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 9, random.integers(2, 9)).tolist()
    flags = ["", "next", "terminated"][seed % 3]
    data = mapping(lengths, flags=flags, seed=seed)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    picked = random.permutation(len(lengths))[: random.integers(1, len(lengths) + 1)].tolist()
    rows = np.concatenate([np.flatnonzero(episode == number) for number in picked])
    kept: Any = random.random(rows.shape[0]) < 0.7
    kept[random.integers(rows.shape[0])] = True
    expected = rows[kept]
    starts = np.flatnonzero(kept)
    cut = np.ones(expected.shape[0], bool)
    cut[:-1] = (starts[1:] != starts[:-1] + 1) | (episode[expected[1:]] != episode[expected[:-1]])
    end_key = "last" if seed == 0 else ("next", "done") if flags == "next" else "done"
    make = TensorDictReplayBuffer if seed > 5 else ReplayBuffer
    episodes = Episodes(end_key="last") if seed == 0 else Episodes()
    rb = make(storage=LazyTensorStorage(500), episodes=episodes, batch_size=8)
    chunk = int(random.integers(1, 12))
    written = rb.load_dataset(data, episodes=picked, rows=torch.from_numpy(kept), batch_rows=chunk)
    assert written == expected.shape[0]
    assert rb["row"].tolist() == expected.tolist()
    assert np.array_equal(rb["observation"].numpy(), data["observation"][expected])
    if flags != "terminated":
        assert rb[end_key].tolist() == cut.tolist()
    if flags:
        stops = (data["next"] if flags == "next" else data)["terminated"][expected]
        path = ("next",) if flags == "next" else ()
        assert rb[*path, "terminated"].tolist() == stops.tolist()
        assert rb[*path, "truncated"].tolist() == (cut & ~stops).tolist(), "a cut does not terminate"
    assert rb._engine.tracker is not None
    spans = rb._engine.tracker.table(rb.storage).episodes()
    assert spans.rows.tolist() == np.diff(np.flatnonzero(cut), prepend=-1).tolist()
    assert bool(spans.closed.all())


def test_values_are_cast_to_the_rows_stored_and_flags_may_not_be_missing():
    rb = buffer()
    rb.extend({"x": torch.zeros(2), "done": torch.ones(2, dtype=torch.bool)})
    rb.load_dataset({"x": np.array([1.5, 2.5]), "episode_ends": [2]})
    assert rb["x"].dtype is torch.float32
    assert rb["x"].tolist() == [0, 0, 1.5, 2.5]
    rb = buffer()
    rb.extend({"row": torch.arange(2)})
    with pytest.raises(SchemaError, match="no field 'done'"):
        rb.load_dataset(mapping([2, 2]), fields=["row"])
    with pytest.raises(SchemaError):
        rb.load_dataset(mapping([2, 2]))
    assert len(rb) == 2


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_more_rows_than_fit(storage):
    rb = buffer(storage=storage(8))
    with pytest.raises(CapacityError):
        rb.load_dataset(mapping([4, 5]))
    assert len(rb) == 0
    assert rb.load_dataset(mapping([4, 5]), overwrite=True, batch_rows=2) == 9
    assert sorted(int(rb[i]["row"]) for i in range(8)) == list(range(1, 9))


def test_buffers_that_cannot_be_written_or_go_on_wrongly():
    data = {"row": np.arange(6), "episode": np.array([0, 0, 0, 1, 1, 1]), "episode_ends": [3, 6]}
    for rb, words in (
        (ReplayBuffer(storage=open_dataset(data)), "read-only, its storage is DatasetStorage"),
        (buffer(writer=ImmutableDatasetWriter()), "read-only, its writer is ImmutableDatasetWriter"),
        (buffer(storage=LazyTensorStorage(100, ndim=2)), "ndim=2"),
    ):
        with pytest.raises(UsageError, match=words):
            rb.load_dataset(data)
    rb = buffer(sampler=SliceSampler(slice_len=2, traj_key="episode"))
    with pytest.raises(SchemaError, match="trajectory id 1 in 'episode'"):
        rb.load_dataset(data, rows=[0, 3, 5])
    assert rb.load_dataset(data) == 6
    with pytest.raises(SchemaError, match="trajectory id 0 in 'episode'"):
        rb.load_dataset(data)
    assert len(rb) == 6
    rb = buffer()
    rb.extend({"row": torch.arange(3), "done": torch.zeros(3, dtype=torch.bool)})
    with pytest.raises(UsageError):
        rb.load_dataset(data, fields=["row"])
    assert len(rb) == 3
    rb.extend({"row": torch.arange(1), "done": torch.ones(1, dtype=torch.bool)})
    assert rb.load_dataset(data, fields=["row"]) == 6


def test_wrong_options_and_sources():
    rb = buffer()
    wrong: list[Any] = [
        *(("rows", value) for value in ([3, 2], [], 3)),
        *(("episodes", value) for value in ([], [7])),
        *(("batch_rows", value) for value in (0, True)),
        ("progress", "bar"),
        ("fields", ["missing"]),
    ]
    for name, value in wrong:
        with pytest.raises(OstinatoError):
            rb.load_dataset(mapping([2, 2]), **{name: value})
    with pytest.raises(OptionError, match="into itself"):
        rb.load_dataset(rb)
    with pytest.raises(TypeError, match="got int"):
        rb.load_dataset(3)  # type: ignore[arg-type]
    assert len(rb) == 0


@pytest.mark.usefixtures("every_step")
def test_an_error_says_how_many_rows_were_written_and_another_writer_is_noticed():
    def fail(batch: Any) -> Any:
        if int(batch["row"][0]) >= 4:
            msg = "no more"
            raise ValueError(msg)
        return batch

    rb = buffer()
    rb.append_transform(fail, invert=True)
    with pytest.raises(ValueError, match="no more") as caught:
        rb.load_dataset(mapping([4, 6]), batch_rows=4)
    assert caught.value.__notes__ == ["load_dataset: 4 of 10 rows were written before"]
    other = buffer()
    with pytest.raises(UsageError):
        other.load_dataset(mapping([4, 9]), batch_rows=4, progress=lambda done, _: done and other.extend(other[:1]))


# -- buffers as datasets -----------------------------------------------------------------------------------------------


def steps(first: int, count: int, *, ends: tuple[int, ...] = ()) -> dict[str, Any]:
    rows = torch.arange(first, first + count)
    return {"row": rows, "done": torch.isin(rows, torch.tensor(ends))}


@pytest.mark.parametrize("kind", ["tensors", "tracked", "list"])
def test_a_ring_is_copied_in_the_order_of_time(kind):
    storage = ListStorage(10) if kind == "list" else LazyTensorStorage(10)
    source = buffer(storage=storage, episodes=Episodes() if kind == "tracked" else None)
    for part in (steps(0, 8, ends=(3, 7)), steps(8, 7, ends=(11,))):
        source.extend(TensorDict(part, [len(part["row"])]))
    rb = buffer()
    assert rb.load_dataset(source) == 10
    assert rb["row"].tolist() == list(range(5, 15))
    assert torch.nonzero(rb["done"]).flatten().tolist() == [2, 6, 9]  # the newest episode is cut
    assert not source[4]["done"]


def test_a_single_copy_of_observations_is_read_as_two_and_fields_are_left_out():
    source = buffer(storage=LazyTensorStorage(50, single_copy=True))
    obs, done = torch.arange(39.0).view(13, 3), torch.arange(12) % 6 == 5
    following = obs[1:] + done[:, None]
    source.extend({"observation": obs[:-1], "next": {"observation": following, "done": done}})
    rb = buffer()
    rb.load_dataset(source)
    assert torch.equal(rb["next", "observation"], following)
    rb, objects = buffer(), buffer()
    objects.extend({**steps(0, 3, ends=(2,)), "note": [None, b"x", "y"]})
    ragged = buffer(storage=RaggedTensorStorage(10, ragged="tokens", layout="padded"))
    ragged.extend({**steps(0, 3, ends=(2,)), "tokens": [torch.zeros(n + 1) for n in range(3)]})
    for other, words in ((objects, "Python objects"), (ragged, "another length")):
        with pytest.raises(SchemaError, match=words):
            rb.load_dataset(other)
        assert rb.load_dataset(other, fields={"row": "row", "done": "done"}) == 3
    assert rb["row"].tolist() == [0, 1, 2, 0, 1, 2]


def test_buffers_over_datasets_shared_ones_and_text_are_sources(tmp_path):
    source = buffer()
    source.extend({**steps(0, 5, ends=(1, 4)), "task": ["a", "a", "b", "cc", "b"]})
    for rb in (buffer(), buffer(storage=ListStorage(10))):
        assert rb.load_dataset(source, episodes=[1]) == 3
        assert [rb[i]["task"] for i in range(3)] == ["b", "cc", "b"]
        assert [int(rb[i]["row"]) for i in range(3)] == [2, 3, 4]
    data = mapping([4, 5], flags="next")
    shared = buffer(shared=True)
    assert shared.load_dataset(data, batch_rows=2) == 9
    shared.dumps(tmp_path / "saved")
    for other in (shared, ReplayBuffer(storage=open_dataset(data)), tmp_path / "saved"):
        rb = buffer()
        assert rb.load_dataset(other, episodes=[1]) == 5
        assert rb["row"].tolist() == list(range(4, 9))
