"""Text and other non-tensor fields: kept beside tensors, and handed out as they came, or an error that names them."""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    tensorclass,
)

from ostinato import (
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    ReplayBuffer,
    ReservoirWriter,
    SequenceUnit,
    TensorDictReplayBuffer,
    TensorStorage,
)
from ostinato.durable import CheckpointReader
from ostinato.durable.arrays import DTYPES
from ostinato.errors import CheckpointError, DamagedFileError, KindError, OstinatoError, SchemaError
from ostinato.storages.columns import unpack_column
from ostinato.tools import inspect_checkpoint
from ostinato.transforms import Cast, Compose, Rename, ToDevice

from ...registry import ring

if TYPE_CHECKING:
    from pathlib import Path


class _Message:
    x: torch.Tensor
    text: str


Message: Any = tensorclass(_Message)


STORAGES: dict[str, Any] = {
    "packed": LazyTensorStorage,
    "mapped": LazyMemmapStorage,
    "single copy": lambda n: LazyTensorStorage(n, single_copy={"next_x": "x"}),
    "list": ListStorage,
}


def letters(first: int, stop: int) -> TensorDict:
    """Rows whose text tells their number, and the number of the row that follows."""
    x = torch.arange(first, stop)
    return TensorDict(
        {
            "prompt": [f"p{i}" for i in x.tolist()],
            "meta": NonTensorStack(*(NonTensorData({"row": i, "none": None}) for i in x.tolist())),
            "x": x,
            "next_x": x + 1,
            "next_prompt": [f"p{i + 1}" for i in x.tolist()],
        },
        [stop - first],
    )


def check(rows: Any) -> None:
    """Every text is that of the row's number."""
    numbers = rows["x"].tolist()
    assert list(rows["prompt"]) == [f"p{i}" for i in numbers]
    assert list(rows["meta"]) == [{"row": i, "none": None} for i in numbers]


@pytest.mark.parametrize("storage", list(STORAGES))
def test_text_is_returned_with_its_rows_and_edits_reach_it(storage):
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](5), batch_size=32)
    rb.extend(letters(0, 3))
    rb.add(letters(3, 4)[0])
    check(rb.sample())
    rb.extend(letters(4, 9))  # the ring is full, and wraps
    assert rb[:]["prompt"] == [f"p{i}" for i in (5, 6, 7, 8, 4)]
    for index in (slice(None), slice(1, 4), torch.tensor([0, 3, 3]), torch.tensor([True, False, True, False, True])):
        check(rb[index])
    assert rb[1]["prompt"] == "p6"
    assert isinstance(rb.sample().get("prompt"), NonTensorStack)
    if storage != "list":
        rb[1:3] = letters(7, 9)
        check(rb[:])
        rb[torch.tensor([0, 0])] = letters(5, 7)
        assert rb[0]["prompt"] == "p6"
        rb.set_at_("prompt", ["u", "v"], slice(0, 2))
        rb.set_("next_prompt", list("abcde"))
        assert (rb["prompt"][:3], rb["next_prompt"]) == (["u", "v", "p8"], list("abcde"))
        rb.write_all(letters(0, 5))
        check(rb[:])
    rb.empty()
    rb.extend(letters(7, 9))
    check(rb[:])


def test_rows_of_a_dict_give_lists():
    rb = ring(6, batch_size=16)
    rb.extend({"a": ["u", None], "b": np.array(["v", "w"]), "c": (b"1", b"2"), "x": torch.arange(2)})
    rb.add({"a": {"any": ["object"]}, "b": "z", "c": None, "x": torch.tensor(2)})
    rb.extend([{"a": None, "b": None, "c": 1, "x": torch.tensor(3)}, {"a": 1.5, "b": "q", "c": "d", "x": 4}])
    stored: dict[str, Any] = {
        "a": ["u", None, {"any": ["object"]}, None, 1.5],
        "b": ["v", "w", "z", None, "q"],
        "c": [b"1", b"2", None, 1, "d"],
    }
    batch = rb.sample()
    for rows in (rb[:], batch):
        for key, values in stored.items():
            assert rows[key] == [values[i] for i in rows["x"].tolist()]
    rb.extend(rb[:2])
    assert rb["a"] == [None, *stored["a"][1:], "u"]


def test_rows_of_tensordicts_give_stacks():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=ReservoirWriter())
    rb.extend(letters(0, 50))
    check(rb[:])
    words, note = [["a", "b", "c"], ["d", "e", "f"]], {"k": [1]}
    wide, rb = (TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2))
    wide.extend(TensorDict({"x": torch.zeros(2, 3), "w": words}, [2, 3]))
    assert (wide["w"], wide[1]["w"]) == (words, words[1]), "batch dimensions of the row are kept"
    rb.extend(TensorDict({"one": NonTensorData(note, batch_size=[2])}, [2]))
    note["k"].append(2)
    assert rb["one"] == [{"k": [1]}] * 2, "one object for all rows, of which the caller may change his"
    messages = ring(4, batch_size=8)
    messages.extend(Message(x=torch.arange(2), text=["a", "b"], batch_size=[2]))
    batch = messages.sample()
    assert isinstance(batch, Message)
    assert list(batch.text) == ["ab"[i] for i in batch.x.tolist()]


def test_two_dimensions_in_either_order():
    data = TensorDict({"p": [["a", "b", "c"], ["d", "e", "f"]], "x": torch.arange(6).view(2, 3)}, [2, 3])
    forms: list[Any] = [data, {"p": [list(row) for row in data["p"]], "x": data["x"]}]
    for rows, dim in zip(forms * 2, (0, 0, 1, 1), strict=True):
        rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=8, dim_extend=dim)
        rb.extend(rows)
        assert rb.storage["p"] == ([["a", "d"], ["b", "e"], ["c", "f"]] if dim else data["p"])
        assert rb[:, 2]["p"] == ["c", "f"]
        batch = rb.sample()
        assert list(batch["p"]) == ["abcdef"[i] for i in batch["x"].tolist()]
    for text in (["a", "b"], [["a"], ["b", "c"]], "a", np.array(["a", "b"])):
        with pytest.raises(OstinatoError, match="'p'"):
            rb.extend({"x": torch.zeros(2, 2), "p": text})
    assert len(rb) == 6
    batch = ReplayBuffer(storage=TensorStorage(data, ndim=2), batch_size=8).sample()
    assert list(batch["p"]) == ["abcdef"[i] for i in batch["x"].tolist()]
    with pytest.warns(UserWarning, match="stored as one row"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(4)).add(data[0])


def test_windows_hold_the_text_of_their_rows():
    def sample(**options: Any) -> Any:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=12, **options)
        data = letters(0, 20)
        data["reward"], data["done"] = torch.ones(20), torch.arange(20) % 5 == 4
        rb.extend(data)
        return rb.sample()

    check(sample(sample_unit=SequenceUnit(3, burn_in=1)))
    batch = sample(transform=Compose(Rename({"prompt": "q"}), Cast(torch.float32, "x"), ToDevice("cpu")))
    assert list(batch["q"]) == [f"p{int(i)}" for i in batch["x"]]
    steps = sample(sample_unit=NStep(3, 0.9))
    check(steps)
    assert list(steps["next_prompt"]) == [f"p{i}" for i in (steps["x"] + steps["steps_to_next_obs"]).tolist()]
    stacked = sample(sample_unit=FrameStack(2, ["x"]))
    assert list(stacked["prompt"]) == [f"p{i}" for i in stacked["x"][:, -1].tolist()]
    for unit in (FrameStack(2, ["prompt"]), NStep(2, 0.9, reward_key="prompt")):
        with pytest.raises(KindError, match=r"'prompt'.*Python objects"):
            sample(sample_unit=unit)


WRONG: list[Any] = [
    ({"p": "a", "x": torch.zeros(2)}, "'p'.*one for each row"),
    ({"p": ["a"], "x": torch.zeros(2)}, "'p'.*a list of 1"),
    ({"p": np.array([["a"], ["b"]]), "x": torch.zeros(2)}, r"'p'.*\[2, 1\]"),
    ({"p": torch.zeros(2), "x": torch.zeros(2)}, "'p'.*Python objects"),
    ({"p": ["a", "b"], "x": ["c", "d"]}, "'x'"),
    ({"x": torch.zeros(2)}, r"missing \['p'\]"),
    ({"p": NonTensorData("a", batch_size=[3]), "x": torch.zeros(2)}, r"'p'.*\[3\]"),
]


def test_text_that_does_not_fit_raises_and_changes_nothing():
    rb, bare = (ring(3) for _ in range(2))
    for text in (np.array([1, "a"], dtype=object), None, object()):
        with pytest.raises(OstinatoError, match="'p'"):
            rb.extend({"p": text, "x": torch.zeros(2)})
        assert not rb.storage.laid_out
    rb.extend({"p": ["u", "v"], "x": torch.ones(2)})
    for rows, message in WRONG:
        for write in (rb.extend, lambda data: rb.__setitem__(slice(0, 2), data)):
            with pytest.raises(OstinatoError, match=message):
                write(rows)
            assert (len(rb), rb["p"], rb["x"].tolist(), rb.cursor) == (2, ["u", "v"], [1, 1], 2)
    bare.extend({"x": torch.ones(2)})
    with pytest.raises(KindError, match="'p' is text"):
        bare[:] = {"x": torch.ones(2), "p": ["a", "b"]}
    assert list(bare[:]) == ["x"]


# -- on disk --------------------------------------------------------------------------------------------------------


def saved(storage: Any, path: Path, **options: Any) -> ReplayBuffer:
    rb = TensorDictReplayBuffer(storage=storage, batch_size=8)
    rb.loads(path, **options)
    return rb


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_checkpoints_hold_text(storage, tmp_path):
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](5), batch_size=8)
    for first, stop in ((0, 3), (3, 8)):
        rb.extend(letters(first, stop))
        rb.dumps(tmp_path, incremental=storage == "packed")
    others = [saved(STORAGES[storage](5), tmp_path, verify=False), pickle.loads(pickle.dumps(rb))]
    others.append(TensorDictReplayBuffer(storage=STORAGES[storage](5)))
    others[2].load_state_dict(rb.state_dict())
    for again in others:
        assert again[:]["prompt"] == rb[:]["prompt"]
        check(again[:])
    for made, options in (
        (
            (LazyTensorStorage(9, packed=False), {}),
            (LazyMemmapStorage(7), {}),
            (STORAGES["single copy"](5), {}),
            (LazyTensorStorage(5), {"mmap": True}),
        )
        if storage == "packed"
        else ()
    ):
        again = saved(made, tmp_path, **options)
        again.extend(letters(8, 10))
        check(again[:])


def test_text_is_utf8_and_other_values_json(tmp_path):
    rows = TensorDict(
        {"x": torch.arange(2), "t": ["\u00e4", ""], "v": NonTensorStack("\ud800", NonTensorData(None))}, [2]
    )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(rows)
    rb.dumps(tmp_path)
    reader = CheckpointReader(tmp_path, format_name="ostinato-buffer")
    assert reader.read("object 0.t.text").tolist() == list("\u00e4".encode())
    assert reader.read("object 0.t.ends").tolist() == [2, 2]
    assert reader.state()["storage"]["state"]["objects"] == {"object 0.t": "text", "object 1.v": "json"}
    assert saved(LazyTensorStorage(5), tmp_path)["v"] == ["\ud800", None]
    assert [field.dtype for field in inspect_checkpoint(tmp_path).fields] == ["object", "object", "int64"]


def test_other_objects_are_pickled_only_on_request(tmp_path):
    for kind in (LazyTensorStorage, LazyMemmapStorage):
        rb, trusted = (TensorDictReplayBuffer(storage=kind(5, allow_pickle=allowed)) for allowed in (False, True))
        for each in (rb, trusted):
            each.extend(stack_of([THING, "a"]))
        with pytest.raises(CheckpointError, match=r"'object 0.leaf'.*allow_pickle=True"):
            rb.dumps(tmp_path / "none")
        assert not (tmp_path / "none").exists()
        trusted.dumps(tmp_path / kind.__name__)
        with pytest.raises(CheckpointError, match="allow_pickle=True"):
            saved(kind(5), tmp_path / kind.__name__)
        assert saved(kind(5, allow_pickle=True), tmp_path / kind.__name__)["leaf"] == [THING, "a"]


def test_damaged_columns_of_text_raise():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(TensorDict({"x": torch.arange(2), "t": ["ab", "cd"]}, [2]))
    state = rb.storage.state_dict()
    for objects in ({}, {"object 0.t": ["ab"]}):
        with pytest.raises(CheckpointError, match="'t'"):
            LazyTensorStorage(5).load_state_dict({**state, "objects": objects})
    text, ends = torch.tensor([97, 98], dtype=torch.uint8), torch.tensor([1, 2])
    for form, raw, wrong in (("text", text, ends.flip(0)), ("pickle", text, ends), ("text", text + 158, ends)):
        with pytest.raises(DamagedFileError, match="'t'"):
            unpack_column("t", form, raw, wrong, allow_pickle=True)


def test_flushed_directories_reopen_with_text(tmp_path):
    def reopened() -> LazyMemmapStorage:
        return LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True)

    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    for first in (0, 4):
        rb.extend(letters(first, first + 4))
        rb.storage.flush()  # type: ignore[attr-defined]
        check(reopened()[:])
        assert reopened()["prompt"] == rb["prompt"]
    rb.storage.prepare_field(("prompt",), torch.tensor([1]), ["changed"], (1,))()
    assert len(reopened()) == 0, "an edit ends the flush"
    rb[0:1] = TensorDict({**letters(0, 1), "meta": NonTensorData(THING, batch_size=[1])}, [1])
    with pytest.raises(CheckpointError, match=r"'object \d.meta'"):
        rb.storage.flush()  # type: ignore[attr-defined]
    assert len(reopened()) == 0


# -- every kind of leaf that a TensorDict can hold ------------------------------------------------------------------


class Thing:
    """An object that nothing but pickle can write."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing)

    def __hash__(self) -> int:
        return 1


THING = Thing()
OBJECTS: dict[str, Any] = {
    "str": ["ä", ""],
    "bytes": [b"\0", b""],
    "int": [1, 2**70],
    "mixed numbers": [1, 0.5],
    "None": [None, None],
    "dict": [{"a": 1}, {}],
    "ragged lists": [["a"], ["b", ["c"]]],
    "objects": [THING, {1, 2}],
    "mixed": ["a", None],
}


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.arange(7, 7 + count, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def ragged() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        *(TensorDict({"leaf": torch.ones(n), "x": torch.ones(())}, []) for n in (1, 2)), stack_dim=0
    )


def in_rows(leaf: Any) -> TensorDict:
    return TensorDict({"x": torch.tensor([3.0, 4.0]), "leaf": leaf}, [2])


def tensors(dtype: torch.dtype, *shape: int) -> TensorDict:
    return in_rows(bits(dtype, *shape))


def stack_of(values: list[Any]) -> TensorDict:
    return in_rows(NonTensorStack(*map(NonTensorData, values)))


LEAVES: dict[str, Any] = {
    **{f"tensor {dtype}": partial(tensors, dtype, 2, 3) for dtype in DTYPES.values()},
    "no bytes": partial(tensors, torch.uint8, 2, 0, 3),
    **{f"stack of {name}": partial(stack_of, values) for name, values in OBJECTS.items()},
    "one for all": lambda: in_rows(NonTensorData({"a": 1}, batch_size=[2])),
    "metadata": lambda: in_rows(MetaData("m")),
    "nested": lambda: in_rows(TensorDict({"a": {"t": ["u", "v"], "y": torch.ones(2, 2)}}, [2])),
    "lazy stack": lambda: LazyStackedTensorDict(
        *(TensorDict({"leaf": t, "x": torch.ones(())}, []) for t in "ab"), stack_dim=0
    ),
    "ragged lazy stack": ragged,
    "tensorclass": lambda: in_rows(Message(x=torch.arange(2), text=["a", "b"], batch_size=[2])),
    "conjugate": lambda: in_rows(torch.tensor([1 + 2j, 3 - 1j]).conj()),
    "quantized": lambda: in_rows(torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 0, torch.quint8)),
    "sparse": lambda: in_rows(torch.eye(2).to_sparse()),
    "jagged": lambda: in_rows(
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    ),
    "nested tensor": lambda: in_rows(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
}  # fmt: skip


def show(rows: Any) -> Any:
    """Rows as plain values that compare bit for bit: tensors as dtype, shape and bytes, objects as lists of rows."""
    if isinstance(rows, torch.Tensor):
        if rows.is_nested:
            return [show(part) for part in rows.unbind()]
        if rows.is_quantized:
            return rows.q_scale(), rows.q_zero_point(), show(rows.int_repr())
        dense = rows.detach().to_dense() if rows.is_sparse else rows.detach().resolve_conj().contiguous()
        return rows.layout, dense.dtype, tuple(dense.shape), dense.reshape(-1).view(torch.uint8).tolist()
    if isinstance(rows, NonTensorStack):
        return _plain(rows.tolist())
    if isinstance(rows, (NonTensorData, MetaData)):
        return [_plain(rows.data)] * 2 if rows.batch_size == (2,) else _plain(rows.data)
    fields = rows.to_tensordict() if isinstance(rows, Message) else rows
    return {key: show(fields.get(key)) for key in sorted(fields.keys())}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def held(rb: ReplayBuffer) -> tuple[Any, ...]:
    rows = [show(rb.storage[i]) for i in range(len(rb))]
    return len(rb), rb.cursor, rb.write_count, rb.storage.laid_out, rows


def wrote(rb: ReplayBuffer, kind: str) -> bool:
    """Write two rows of a kind of leaf, which are read as they came; False if they raise and change nothing."""
    before, rows = held(rb), LEAVES[kind]()
    try:
        rb.extend(rows)
    except OstinatoError as error:
        assert "leaf" in str(error)  # noqa: PT017 (it may, and then it must name the field)
        assert held(rb) == before
        return False
    first = before[0]
    assert len(rb) == first + 2
    reads = [(rb.storage[first + i], rows[i]) for i in range(2)]
    reads += [(rb[first : first + 2], rows)] if not isinstance(rb.storage, ListStorage) else []
    assert [show(found) for found, _ in reads] == [show(written) for _, written in reads]
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", ["packed", "list"])
def test_every_kind_of_leaf_is_kept_and_saved_bit_for_bit_or_named(storage, tmp_path):
    for kind in LEAVES:
        rb, again = (ReplayBuffer(storage=STORAGES[storage](4)) for _ in range(2))
        if not wrote(rb, kind) or "object" in kind:
            continue
        try:
            rb.dumps(tmp_path / kind)
        except CheckpointError as error:
            assert storage == "list", "rows of a list are looked at when they are saved"
            assert "'leaf'" in str(error)  # noqa: PT017
            continue
        again.loads(tmp_path / kind)
        assert held(again)[-1] == held(rb)[-1], kind


# -- nothing but objects --------------------------------------------------------------------------------------------


def test_rows_without_tensors(tmp_path):
    def rows(first: int, stop: int) -> TensorDict:
        return TensorDict({"text": [str(i) for i in range(first, stop)]}, [stop - first])

    for storage in (LazyTensorStorage, LazyMemmapStorage):
        rb = TensorDictReplayBuffer(storage=storage(6), batch_size=4)
        rb.extend(rows(0, 4))
        assert rb.add(rows(4, 5)[0]) == 4
        rb.extend(rows(5, 7))
        rb[:2] = rows(90, 92)
        assert rb["text"] == list(rb[:]["text"]) == ["90", "91", "2", "3", "4", "5"]
        rb.dumps(tmp_path / storage.__name__)
        again = saved(storage(6), tmp_path / storage.__name__)
        for each in (rb, again):
            batch = each.sample()
            assert list(batch["text"]) == [rb["text"][i] for i in batch["index"]]
        assert again.extend(rows(7, 8)).tolist() == [1]
    rb, lists = TensorDictReplayBuffer(storage=LazyTensorStorage(6)), ring(6)
    rb.extend(TensorDict({}, [3]))
    assert rb[:].batch_size == (3,)
    lists.extend({"name": ["a", "b"], "of": ["c", "d"]})
    for wrong in ({}, NonTensorData("x", batch_size=[4]), {"name": ["a", "b"], "of": ["c"]}):
        with pytest.raises(SchemaError):
            lists.extend(wrong)
    assert lists[:] == {"name": ["a", "b"], "of": ["c", "d"]}
