"""Checkpointers: each layout restores rows, order and cursor, alone and through a buffer; damaged files raise.

Also storages saved without a buffer, with every kind of rows.
"""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict, is_tensorclass, tensorclass

from ostinato import (
    CompressedListStorageCheckpointer,
    FlatStorageCheckpointer,
    H5Combine,
    H5Split,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    Nested2TED,
    NestedStorageCheckpointer,
    ReplayBuffer,
    StorageCheckpointerBase,
    StorageEnsemble,
    StorageEnsembleCheckpointer,
    TED2Nested,
    TensorStorageCheckpointer,
)
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    KindError,
    MissingExtraError,
    OptionError,
    UsageError,
)
from ostinato.tools import inspect_checkpoint, verify

from ...registry import ring
from ...tags import rows, same_state
from ..buffers.refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def h5() -> StorageCheckpointerBase:
    pytest.importorskip("h5py")
    return H5StorageCheckpointer(h5_kwargs={"compression": "gzip"}, checkpoint_file="rows.h5")


def steps(first: int, count: int, envs: int = 0) -> TensorDict:
    """Rows `[count]` or `[count, envs]` in TED format; every fifth step of an environment ends an episode."""
    number = torch.arange(first, first + count, dtype=torch.float32)
    if envs:
        number = number.unsqueeze(1) + 1000 * torch.arange(envs)
    ends = (number % 5 == 4).unsqueeze(-1)
    after = torch.where(ends.squeeze(-1), -number, number + 1)
    obs, following = (x.unsqueeze(-1).expand(*x.shape, 3).to(torch.bfloat16).clone() for x in (number, after))
    reward = number.unsqueeze(-1).to(torch.complex64)
    data = {
        "obs": obs,
        "action": {"kind": (number % 7).long()},
        "next": {"obs": following, "done": ends, "reward": reward},
        "done": torch.zeros_like(ends),
    }
    return TensorDict(data, number.shape)


def assert_same(one: Any, other: Any) -> None:
    """Compare rows and cursors of two buffers or storages."""
    same_state(one[:], other[:])
    assert (len(one), one.cursor) == (len(other), other.cursor)


@pytest.mark.parametrize("written", [7, 53])
@pytest.mark.parametrize(
    ("layout", "storage", "ndim"),
    [
        (FlatStorageCheckpointer, LazyMemmapStorage, 2),
        (NestedStorageCheckpointer, LazyTensorStorage, 1),
        (h5, LazyTensorStorage, 2),
        (h5, LazyTensorStorage, 1),
        (TensorStorageCheckpointer, LazyTensorStorage, 1),
    ],
)
def test_round_trip(layout, storage, ndim, written, tmp_path):
    def make() -> ReplayBuffer:
        made = ReplayBuffer(storage=storage(24, ndim=ndim), batch_size=4, dim_extend=0 if ndim == 2 else None)
        made.storage.checkpointer = layout()
        return made

    rb, other, bare = make(), make(), make().storage
    for start in range(0, written, 6):
        rb.extend(steps(start, min(6, written - start), envs=0 if ndim == 1 else 2))
        if start % 18 == 0:
            rb.dumps(tmp_path / "saved")
            other.loads(tmp_path / "saved")
            assert_same(rb, other)
    rb.dumps(tmp_path / "saved")  # over the older one
    other.loads(tmp_path / "saved")
    for buffer in (rb, other):  # writing continues where it was
        buffer.extend(steps(written, 5, envs=0 if ndim == 1 else 2))
    assert_same(rb, other)
    rb.storage.dumps(tmp_path / "alone")
    bare.loads(tmp_path / "alone")
    assert_same(rb.storage, bare)
    assert not verify(tmp_path / "saved").damage


def test_layouts_hold_observations_once_and_do_not_mix(tmp_path):
    rows = {}
    for layout in (TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer):
        rb = ring(20, checkpointer=layout())
        rb.extend(steps(0, 20))
        rb.dumps(tmp_path / layout.__name__)
        fields = inspect_checkpoint(tmp_path / layout.__name__).fields
        rows[layout] = sorted((field.name, field.rows) for field in fields)
    assert [found for found in rows[FlatStorageCheckpointer] if "obs" in found[0]] == [("obs (converted by hooks)", 24)]
    assert rows[NestedStorageCheckpointer] == rows[FlatStorageCheckpointer]
    assert ("next.obs", 20) in rows[TensorStorageCheckpointer]
    assert isinstance(pickle.loads(pickle.dumps(rb)).storage.checkpointer, NestedStorageCheckpointer)
    for checkpointer in (None, FlatStorageCheckpointer()):
        other = ring(20, checkpointer=checkpointer)
        with pytest.raises(CheckpointError):
            other.loads(tmp_path / "NestedStorageCheckpointer")
        assert len(other) == 0
    with pytest.raises(OptionError):
        rb.loads(tmp_path / "NestedStorageCheckpointer", mmap=True)


def test_hooks_run_in_order_wherever_they_were_registered(tmp_path):
    calls: list[str] = []

    def hook(name: str) -> Callable[..., Any]:
        def note(data: Any, **_: Any) -> Any:
            calls.append(f"{name} of trajectories" if "traj_0" in set(data.keys()) else name)
            return data

        return note

    for checkpointer in (TensorStorageCheckpointer(), h5()):
        checkpointer.register_save_hook(hook("save"))
        checkpointer.register_load_hook(hook("load"))
        rb = ring(20, checkpointer=checkpointer)
        if not calls:
            rb.register_save_hook(hook("save of storage"))
            rb.register_load_hook(hook("load of storage"))
        rb.extend(steps(0, 5))
        rb.dumps(tmp_path / type(checkpointer).__name__)
        rb.loads(tmp_path / type(checkpointer).__name__)
        with pytest.raises(KindError):
            checkpointer.register_save_hook(3)  # type: ignore[arg-type]
    flat, split = (
        ["save", "save of storage", "load", "load of storage"],
        ["save of trajectories", "load of trajectories"],
    )
    assert calls == flat + split


def test_nested_hooks_alone(tmp_path):
    data = steps(0, 12)
    nested = TED2Nested()(data)
    TED2Nested()(data, path=tmp_path / "nested")
    rows = [[0, 1, 2, 3, 4, -4], [5, 6, 7, 8, 9, -9], [10, 11, 12]]
    assert [item[:, 0].tolist() for item in nested["obs"].unbind()] == rows
    assert [len(item) for item in nested["action", "kind"].unbind()] == [5, 5, 2]
    for made in (nested, H5Combine()(H5Split()(nested)), TensorDict.load_memmap(tmp_path / "nested")):
        out = torch.zeros_like(data)
        assert Nested2TED()(made, out=out) is out
        for back in (out, Nested2TED()(made)):
            assert all(torch.equal(back.get(key), data.get(key)) for key in data.keys(True, True))
    for convert in (H5Split(), H5Combine(), Nested2TED()):
        with pytest.raises(CheckpointError):
            convert(data)


def saved_h5(tmp_path: Path) -> Path:
    pytest.importorskip("h5py")
    storage = LazyTensorStorage(20)
    storage.set(range(20), steps(0, 20))
    storage.checkpointer = H5StorageCheckpointer()
    storage.dumps(tmp_path / "dir")
    storage.dumps(tmp_path / "file.h5")
    assert [path.name for path in (tmp_path / "dir").iterdir()] == ["checkpoint.h5"]
    return tmp_path / "file.h5"


def test_other_programs_read_the_file(tmp_path, monkeypatch):
    path, storage = saved_h5(tmp_path), LazyTensorStorage(20)
    with pytest.importorskip("h5py").File(path) as file:
        assert [name for name in file if name.startswith("traj")] == ["traj_0", "traj_1", "traj_2", "traj_3"]
        assert file["traj_1/action/kind"][()].tolist() == [5, 6, 0, 1, 2]
        assert file["traj_1/obs"].attrs["dtype"] == "bfloat16"
    for place in (path, tmp_path / "dir"):
        H5StorageCheckpointer().loads(storage, place)
        same_state(storage[:]["obs"], steps(0, 20)["obs"])
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ostinato.durable.files.write_all", fail)
    with pytest.raises(MemoryError):
        H5StorageCheckpointer().dumps(storage, path)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dir", "file.h5"]


def external_data(h5py: Any, group: Any) -> None:
    made = group["action"].create_dataset("kind", (5,), "int64", external=[(f"{group.file.filename}.raw", 0, 40)])
    made.attrs["dtype"] = "int64"


def virtual_data(h5py: Any, group: Any) -> None:
    layout = h5py.VirtualLayout((5,), "int64")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", (5,))
    group["action"].create_virtual_dataset("kind", layout).attrs["dtype"] = "int64"


def other_data(values: list[Any]) -> Callable[[Any, Any], None]:
    def change(_: Any, group: Any) -> None:
        group["action"].create_dataset("kind", data=values).attrs["dtype"] = "int64"

    return change


HOSTILE: list[Any] = [
    (lambda h5py, group: group.__setitem__("action/kind", h5py.SoftLink("/traj_1/action/kind")), DamagedFileError),
    (lambda h5py, group: group.__setitem__("action/kind", h5py.ExternalLink("else.h5", "/x")), DamagedFileError),
    (external_data, DamagedFileError),
    (virtual_data, DamagedFileError),
    (other_data(["a"] * 5), DamagedFileError),
    (other_data([1, 2, 3]), CheckpointError),
    (lambda *_: None, CheckpointError),
]


def test_hostile_and_damaged_files_and_wrong_uses(tmp_path, monkeypatch):
    path, storage, checkpointer = saved_h5(tmp_path), LazyTensorStorage(20), H5StorageCheckpointer()
    h5py = pytest.importorskip("h5py")
    storage.set(range(3), steps(40, 3))
    before, whole = storage[:].clone(), path.read_bytes()
    (tmp_path / "file.h5.raw").write_bytes(bytes(1000))
    for change, error in HOSTILE:
        path.write_bytes(whole)
        with h5py.File(path, "r+") as file:
            del file["traj_0/action/kind"]
            change(h5py, file["traj_0"])
        with pytest.raises(error):
            checkpointer.loads(storage, path)
    for raw in (whole[:3000], b"not HDF5" * 100):
        path.write_bytes(raw)
        with pytest.raises(DamagedFileError):
            checkpointer.loads(storage, path)
    same_state(storage[:], before)
    with pytest.raises(CheckpointNotFoundError):
        checkpointer.loads(storage, tmp_path / "nowhere")
    wrong = LazyTensorStorage(3)
    with pytest.raises(UsageError):
        checkpointer.dumps(wrong, tmp_path / "x")
    wrong.set(range(2), TensorDict({"a/b": torch.zeros(2), "next": {"done": torch.zeros(2).bool()}}, [2]))
    with pytest.raises(CheckpointError):
        checkpointer.dumps(wrong, tmp_path / "x")

    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"ostinato\[h5\]"):
        checkpointer.loads(storage, tmp_path / "dir")


def test_lists_and_ensembles(tmp_path):
    items, other = ListStorage(5), ListStorage(5)
    items.set(range(2), [1, 2])
    savers: list[Any] = [
        (ListStorageCheckpointer(), items, other),
        (CompressedListStorageCheckpointer(), items, other),
        (StorageEnsembleCheckpointer(), StorageEnsemble(items), StorageEnsemble(other)),
    ]
    for number, (checkpointer, storage, into) in enumerate(savers):
        other.clear()
        checkpointer.dumps(storage, tmp_path / str(number))
        checkpointer.loads(into, tmp_path / str(number))
        assert other[:] == [1, 2]
    with pytest.raises(KindError):
        StorageEnsembleCheckpointer.dumps(items, tmp_path / "x")  # type: ignore[arg-type]


# -- storages without a buffer ---------------------------------------------------------------------------------


def local_class() -> Any:
    class Rows:
        a: torch.Tensor
        b: torch.Tensor

    return tensorclass(Rows)


def make_rows(kind: str) -> Any:
    """Return four rows."""
    steps = torch.arange(4)
    if kind == "tensorclass":
        return local_class()(a=steps, b=TensorDict({"c": steps * 2.0}, [4]), batch_size=[4])
    if kind == "text":
        return TensorDict({"a": steps, "name": ["k", "l", "m", "n"]}, [4])
    if kind == "nested":
        return {"a": steps, 30: (steps * 2.0, [steps == 1])}
    return {"tensor": steps, "tensordict": TensorDict({"a": steps, "b": {"c": steps * 2.0}}, [4])}[kind]


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_rows_come_back(make, tmp_path):
    for kind in ("tensor", "tensordict", "tensorclass", "nested", "text"):
        storage, empty, used, given = make(9), make(7), make(7), make_rows(kind)
        storage.set(range(4), given)
        used.set(range(4), given)
        used.clear()
        storage.dumps(tmp_path / kind)
        storage.save(tmp_path / kind)
        if kind in {"tensor", "nested"}:
            with pytest.raises(UsageError):
                empty.loads(tmp_path / kind)
            assert empty.schema is None
        for again in (used,) if kind in {"tensor", "nested"} else (empty, used):
            again.load(tmp_path / kind)
            assert len(again) == 4
            assert type(again[:]) is type(storage[:])
            same_state(*(x.to_tensordict() if is_tensorclass(x) else x for x in (again[:], given)))


def test_a_load_that_does_not_fit_changes_nothing(tmp_path):
    storage, items = LazyTensorStorage(4), ListStorage(4)
    storage.set(range(3), rows(range(3)))
    storage.dumps(tmp_path / "s")
    items.set(range(2), torch.arange(2))
    for other, data in ((LazyTensorStorage(4), torch.zeros(2, 3)), (LazyTensorStorage(2), rows(range(2)))):
        other.set(range(2), data)
        with pytest.raises(CheckpointError):
            other.loads(tmp_path / "s")
        same_state(other[:], data)
    for made, from_other in ((items, storage), (storage, items)):
        for wrong in (from_other.state_dict(), {"_storage": {}, "_len": 2}):
            with pytest.raises(CheckpointError):
                made.load_state_dict(wrong)
    raises(
        (lambda: items.loads(tmp_path / "s"), CheckpointError, "form"),
        (lambda: storage.loads(tmp_path / "nothing"), CheckpointNotFoundError, ""),
        (lambda: ring(4).loads(tmp_path / "s"), CheckpointError, "format"),
    )
    file = max((tmp_path / "s").glob("*.bin"), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(DamagedFileError):
        storage.loads(tmp_path / "s")
    same_state(storage[:], rows(range(3)))
    assert [int(row) for row in items] == [0, 1]
