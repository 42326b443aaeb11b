"""codec=: batches, edits and checkpoints are those of a storage without it, bit for bit, and memory is compressed."""

from __future__ import annotations

import bz2
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    Codec,
    FrameStack,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    ZlibCodec,
)
from ostinato.durable import codecs
from ostinato.durable.codecs import has_zstd
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, SchemaError
from ostinato.tools.inspect import inspect_checkpoint
from ostinato.tools.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("backend")

BZ2 = Codec("bz2", bz2.compress, bz2.decompress)
FIELDS = {"obs": "zlib", ("next", "obs"): "auto", "action": ZlibCodec(9)}
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": dict,
    "without replacement": lambda: {"sampler": SamplerWithoutReplacement()},
    "prioritized": lambda: {"sampler": PrioritizedSampler(24, 0.7, 0.5)},
    "slices": lambda: {"sampler": SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False)},
    "slices by priority": lambda: {
        "sampler": PrioritizedSliceSampler(24, 0.7, 0.5, slice_len=2, end_key=("next", "done"), strict_length=False)
    },
    "stacks": lambda: {"sample_unit": FrameStack(3, ["obs"])},
    "n-step": lambda: {"sample_unit": NStep(3, 0.9)},
    "sequences": lambda: {"sample_unit": SequenceUnit(3)},
    "largest": lambda: {"writer": TensorDictMaxValueWriter(rank_key=("next", "reward"))},
}


def data(count: int, seed: int, *, envs: int = 0) -> TensorDict:
    """Return steps with frames that repeat, `[count]` or `[count, envs]`."""
    generator = torch.Generator().manual_seed(seed)
    batch = [count, envs] if envs else [count]
    frames = torch.randint(0, 3, (*batch, 20, 20), generator=generator, dtype=torch.uint8)
    following = {
        "obs": frames.roll(1, -1),
        "reward": torch.randn(batch, generator=generator),
        "done": torch.rand(batch, generator=generator) < 0.3,
    }
    action = torch.randn(*batch, 3, generator=generator)
    return TensorDict({"obs": frames, "action": action, "next": TensorDict(following, batch)}, batch)


def buffer(codec: Any, **options: Any) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(24, codec=codec, ndim=options.pop("ndim", 1))
    generator = torch.Generator().manual_seed(3)
    return TensorDictReplayBuffer(storage=storage, batch_size=8, generator=generator, **options)


def same(a: Any, b: Any) -> None:
    keys = set(a.keys(include_nested=True, leaves_only=True))
    assert keys == set(b.keys(include_nested=True, leaves_only=True))
    for key in keys:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


class Pair:
    """The same buffer twice, without and with a codec; each method is one operation on both."""

    def __init__(self, parts: str, seed: int, directory: Path) -> None:
        self.parts, self.seed, self.directory = parts, seed, directory
        self.both = [self.make(None), self.make(FIELDS)]

    def make(self, codec: Any) -> TensorDictReplayBuffer:
        return buffer(codec, **PARTS[self.parts]())

    def extend(self, rows: TensorDict) -> None:
        one, other = (rb.extend(rows) for rb in self.both)
        assert torch.equal(one, other)

    def add(self, rows: TensorDict) -> None:
        one, other = (rb.add(rows[0]) for rb in self.both)
        assert one == other

    def empty(self, rows: TensorDict) -> None:
        for rb in self.both:
            rb.empty()
        self.extend(rows)

    def sample(self, rows: TensorDict) -> None:
        for _ in range(1 + len(rows) % 3):
            one, other = (rb.sample() for rb in self.both)
            same(one, other)

    def edit(self, rows: TensorDict) -> None:
        where = torch.randint(0, len(self.both[0]), (len(rows),), generator=torch.Generator().manual_seed(self.seed))
        for rb in self.both:
            rb[where] = rows

    def field(self, rows: TensorDict) -> None:
        count = min(len(rows), len(self.both[0]))
        for rb in self.both:
            rb.set_at_("obs", rows["obs"][:count], slice(0, count))

    def save(self, rows: TensorDict) -> None:
        before = len(list(self.directory.iterdir()))
        paths = [self.directory / str(before + i) for i in range(2)]
        for rb, path in zip(self.both, paths, strict=True):
            rb.dumps(path)
        self.both = [self.make(None), self.make(FIELDS)]
        swapped = len(rows) % 2  # the rows of one are loaded by the other
        for i, rb in enumerate(self.both):
            rb.loads(paths[i ^ swapped])

    def swap(self, rows: TensorDict) -> None:
        del rows
        self.both = [pickle.loads(pickle.dumps(rb)) for rb in self.both]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "add", "sample", "sample", "edit", "field", "save", "swap", "empty"]),
        st.integers(1, 30),
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.parametrize("parts", PARTS)
@settings(max_examples=5, deadline=None)
@given(operations=OPERATIONS, seed=st.integers(0, 99))
def test_a_codec_changes_nothing(
    parts: str, operations: list[tuple[str, int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = Pair(parts, seed, tmp_path_factory.mktemp("saves"))
    for number, (what, count) in enumerate([("extend", 9), *operations]):
        getattr(pair, what)(data(count, seed + number))
        plain, coded = pair.both
        assert len(plain) == len(coded)
        same(plain[:], coded[:])
    for rb in pair.both:
        rb.close()


def test_batches_made_ahead() -> None:
    with buffer(None, prefetch=2) as plain, buffer(FIELDS, prefetch=2) as coded:
        for rb in (plain, coded):
            rb.extend(data(30, 0))
        for _ in range(6):
            same(plain.sample(), coded.sample())


def test_several_environments_and_python_objects() -> None:
    plain, coded = (ReplayBuffer(storage=LazyTensorStorage(12, ndim=2, codec=c), batch_size=6) for c in (None, "zlib"))
    for start in range(4):
        for rb in (plain, coded):
            rb.extend(data(2, start, envs=3))
    same(plain[:], coded[:])
    same(plain[1:, 2], coded[1:, 2])
    assert torch.equal(plain["obs"], coded["obs"])
    texts = ReplayBuffer(storage=LazyTensorStorage(12, codec={"obs": "zlib"}), batch_size=6)
    texts.extend({"obs": torch.arange(600).view(3, 200), "text": ["a", "b", "c"]})
    texts[1] = {"obs": torch.zeros(200, dtype=torch.int64), "text": "z"}
    assert texts[:]["text"] == ["a", "z", "c"]
    assert torch.equal(texts[2]["obs"], torch.arange(400, 600))


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(4, 70, dtype=torch.complex64),
        torch.randn(4, 300).to(torch.bfloat16),
        torch.rand(4, 300) < 0.5,
        torch.full((4, 80), float("nan")),
        torch.zeros(4, 0),
        torch.arange(4 * 600).view(600, 4).t().to(torch.float64),
    ],
    ids=["complex", "bfloat16", "bool", "nan", "empty", "transposed"],
)
def test_bits_of_any_dtype(values: torch.Tensor) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4, codec={"x": "zlib"}), batch_size=4)
    rb.extend({"x": values, "y": torch.arange(4)})
    found = rb[:]
    assert found["x"].dtype == values.dtype
    bits = values.contiguous().view(torch.uint8) if values.numel() else values
    assert torch.equal(found["x"].view(torch.uint8) if values.numel() else found["x"], bits)


def test_bytes_stay_compressed_in_memory_and_files(tmp_path: Path) -> None:
    frames = torch.zeros(64, 84, 84, 4, dtype=torch.uint8)
    frames[:, 20:40, 30:50] = torch.arange(64, dtype=torch.uint8).view(64, 1, 1, 1)
    rb = ReplayBuffer(storage=LazyTensorStorage(64, codec="zlib"), batch_size=8)
    rb.extend({"obs": frames, "reward": torch.arange(64.0)})
    assert rb.storage.nbytes < frames.nbytes / 50
    rb.dumps(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < frames.nbytes / 20
    assert not verify(tmp_path).damage
    report = inspect_checkpoint(tmp_path)
    assert any("zlib" in field.name and field.shape == (84, 84, 4) for field in report.fields)
    raw = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    raw.loads(tmp_path)
    assert torch.equal(raw["obs"], frames)
    raw.extend({"obs": frames[:2], "reward": torch.zeros(2)})
    assert len(raw) == 66


@pytest.mark.parametrize("saved", [None, "zlib", {"obs": BZ2}], ids=["raw", "zlib", "bz2"])
@pytest.mark.parametrize("loaded", [None, "zlib", {"obs": "zlib", "x": BZ2}], ids=["raw", "zlib", "zlib and bz2"])
def test_full_rings_of_another_capacity(saved: Any, loaded: Any, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, codec=saved), batch_size=8)
    rb.extend({"obs": torch.arange(11 * 100).view(11, 100), "x": torch.arange(11)})
    rb.dumps(tmp_path)
    bigger = ReplayBuffer(storage=LazyTensorStorage(10, codec=loaded), batch_size=8)
    if saved is not None and not isinstance(saved, str) and loaded in (None, "zlib"):
        with pytest.raises(CheckpointError, match="saved with the codec 'bz2'"):
            bigger.loads(tmp_path)
        return
    bigger.loads(tmp_path)
    assert bigger["x"].tolist() == list(range(3, 11))
    assert torch.equal(bigger["obs"], torch.arange(300, 1100).view(8, 100))
    bigger.extend({"obs": torch.zeros(3, 100, dtype=torch.int64), "x": torch.tensor([11, 12, 13])})
    assert sorted(bigger["x"].tolist()) == list(range(4, 14))


def test_incremental_saves_and_failed_loads(tmp_path: Path) -> None:
    rb = buffer("zlib")
    rb.extend(data(10, 0))
    rb.dumps(tmp_path)
    rb.extend(data(4, 1))
    rb.dumps(tmp_path, incremental=True)
    again = buffer("zlib")
    again.loads(tmp_path)
    same(rb[:], again[:])
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(24, codec="zlib"), batch_size=2)
    other.extend(data(3, 5).exclude("action"))
    before = other[:]
    with pytest.raises(CheckpointError):
        other.loads(tmp_path)
    same(other[:], before)


def test_rows_saved_with_a_codec_cannot_be_mapped(tmp_path: Path) -> None:
    rb = buffer("zlib")
    rb.extend(data(10, 0))
    rb.dumps(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be mapped: load it with mmap=False"):
        buffer(None).loads(tmp_path, mmap=True)
    with pytest.raises(OptionError, match="mmap=True needs"):
        buffer("zlib").loads(tmp_path, mmap=True)


def test_a_damaged_value_raises_when_it_is_read() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, codec={"obs": "zlib"}), batch_size=8)
    rb.extend({"obs": torch.zeros(4, 100), "x": torch.arange(4)})
    state = rb.storage.state_dict()
    columns = state["columns"]
    (blobs,) = [name for name in columns if name.endswith(".blobs")]
    other = LazyTensorStorage(8, codec={"obs": "zlib"})
    other.load_state_dict({**state, "columns": {**columns, blobs: columns[blobs] ^ 255}})
    with pytest.raises(DamagedFileError, match="cannot be decompressed"):
        other[0]
    (ends,) = [name for name in columns if name.endswith(".ends")]
    for wrong in (columns[ends].flip(0), columns[ends][:3], columns[ends].float()):
        with pytest.raises(CheckpointError, match="damaged"):
            LazyTensorStorage(8).load_state_dict({**state, "columns": {**columns, ends: wrong}})
    with pytest.raises(CheckpointError, match="damaged"):
        LazyTensorStorage(8).load_state_dict({**state, "columns": {k: v for k, v in columns.items() if k != ends}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "gzip"}, "must be 'zstd'"),
        ({"codec": {}}, "names no field"),
        ({"codec": "zlib", "single_copy": True}, "codec and single_copy cannot be used together"),
    ],
)
def test_wrong_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LazyTensorStorage(8, **options)


def test_wrong_fields_raise_with_the_first_rows() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, codec={"frame": "zlib"}), batch_size=2)
    with pytest.raises(OptionError, match=r"frame.* is not a tensor field"):
        rb.extend({"obs": torch.zeros(2, 100)})
    narrow = ReplayBuffer(storage=LazyTensorStorage(8, codec="zlib"), batch_size=2)
    with pytest.raises(OptionError, match="more than 256 bytes per row, and there are none"):
        narrow.extend({"obs": torch.zeros(2, 10)})
    assert len(narrow) == 0
    rb = ReplayBuffer(storage=LazyTensorStorage(8, codec="zlib"), batch_size=2)
    rb.extend({"obs": torch.zeros(2, 100)})
    with pytest.raises(SchemaError):
        rb.extend({"obs": torch.zeros(2, 101)})
    assert len(rb) == 2


def test_reads_are_copies() -> None:
    rb = buffer("zlib")
    rb.extend(data(5, 0))
    before = rb[:]
    rb[1:3]["obs"].fill_(9)
    rb[1:3]["action"].fill_(9)
    same(rb[:], before)


def test_large_batches_use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_pool", pool := codecs._Pool())
    pool.workers = 2
    seen = set()

    def compress(values: memoryview) -> bytes:
        seen.add(threading.get_ident())
        return b"x" + bytes(values)

    own = Codec("own", compress, lambda blob: memoryview(blob)[1:])
    rb = ReplayBuffer(storage=LazyTensorStorage(64, codec={"obs": own}), batch_size=64)
    frames = torch.randint(0, 255, (64, 40_000), dtype=torch.uint8)
    rb.extend({"obs": frames})
    assert len(seen) == 2
    batch, info = rb.sample(return_info=True)
    assert torch.equal(batch["obs"], frames[info["index"]])


def test_readers_and_writers_in_threads() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(32, codec={"obs": "zlib"}), batch_size=32)
    rb.extend({"obs": torch.zeros(32, 500, dtype=torch.int64), "id": torch.zeros(32, dtype=torch.int64)})
    stop = threading.Event()
    wrong: list[Any] = []

    def read() -> None:
        while not stop.is_set():
            batch = rb.sample()
            if not (batch["obs"] == batch["id"][:, None]).all():
                wrong.append(batch)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(60):
        ids = torch.arange(number, number + 5)
        rb.extend({"obs": ids[:, None].expand(5, 500).contiguous(), "id": ids})
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not has_zstd(), reason="needs ostinato[zstd]")
def test_checkpoints_of_zstd(tmp_path: Path) -> None:
    rb = buffer("zstd")
    rb.extend(data(12, 0))
    rb.dumps(tmp_path)
    for codec in (None, "zlib", "zstd"):
        again = buffer(codec)
        again.loads(tmp_path)
        same(again[:], rb[:])
