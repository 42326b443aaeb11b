"""Incremental saves: what is loaded is what was saved, and what is written is what has changed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
)
from ostinato.durable import CheckpointReader
from ostinato.durable.patched_arrays import MOST_PATCHES
from ostinato.errors import DamagedFileError

from ...effort import examples
from ...tags import STORAGES, TENSORS, buffer, fill, read_ids, rows, same_state, snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato import Storage

MANY = 20_000


def files(path: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in path.iterdir()}


def chain(path: Path) -> int:
    arrays = CheckpointReader(path, format_name="ostinato-buffer").arrays
    return max(len(record.patches) for record in arrays.values())


def reloaded(rb: ReplayBuffer, path: Path, storage: Storage) -> ReplayBuffer:
    other = ReplayBuffer(
        storage=storage, sampler=type(rb.sampler)(), batch_size=3, generator=torch.Generator().manual_seed(9)
    )
    other.loads(path)
    return other


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 50)),
        st.tuples(st.just("edit"), st.lists(st.integers(0, 39), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("sample"), st.just(0)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("field"), st.integers(0, 39)),
        st.tuples(st.just("save"), st.booleans()),
    ),
    max_size=12,
)


@pytest.mark.parametrize("storage", [*TENSORS, "list"])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@given(steps=STEPS)
@examples(0.25)
def test_whatever_happened_between_saves_is_in_the_next_one(
    storage: str, sampler: Any, steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("save") / "chain"
    rb = buffer(storage, 40, sampler=sampler(), batch_size=3, generator=torch.Generator().manual_seed(0))
    number = 0
    for verb, what in [*steps, ("save", True)]:
        if verb == "extend":
            fill(rb, range(number, number + what))
            number += what
        elif verb == "edit" and len(rb):
            slots = torch.tensor(sorted({slot % len(rb) for slot in what}))
            fresh = range(number, number + len(slots))
            rb[slots] = rows(fresh, "dicts" if storage == "list" else "dict")
            number += len(slots)
        elif verb == "field" and len(rb) and storage != "list":
            rb.set_at_("id", torch.tensor([7]), torch.tensor([what % len(rb)]))
        elif verb == "sample" and len(rb):
            rb.sample()
        elif verb == "empty":
            rb.empty()
        elif verb == "save":
            rb.dumps(path, incremental=what)
            other = reloaded(rb, path, STORAGES[storage](40))
            same_state(snapshot(other), snapshot(rb))
    shutil.rmtree(path)


def test_rows_in_ring_order_cost_what_they_weigh(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(MANY), generator=torch.Generator())
    fill(rb, range(MANY + 5))
    rb.dumps(tmp_path / "save")
    before = files(tmp_path / "save")
    fill(rb, range(MANY, MANY + 100))
    rb.dumps(tmp_path / "save", incremental=True)
    added = {name: size for name, size in files(tmp_path / "save").items() if name not in before}
    width = sum(array.row_bytes for array in rb.storage.row_arrays())
    # a large run lies on pages of its own, which may cost one page before and one after it
    assert sum(added.values()) < 100 * width + 2 * 4096 * len(rb.storage.row_arrays()) + 4096
    assert chain(tmp_path / "save") == 1
    other = buffer(LazyTensorStorage(MANY))
    other.loads(tmp_path / "save")
    same_state(snapshot(other), {**snapshot(rb)})


def test_scattered_edits_cost_what_they_weigh(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(MANY))
    fill(rb, range(MANY))
    rb.dumps(tmp_path / "save", incremental=True)
    before = files(tmp_path / "save")
    slots = torch.arange(0, MANY, 97)
    rb[slots] = rows(slots + MANY)
    rb.dumps(tmp_path / "save", incremental=True)
    after = files(tmp_path / "save")
    data = sum(size for name, size in after.items() if name not in {*before, "manifest.json"} and "state" not in name)
    widths = [array.row_bytes for array in rb.storage.row_arrays()]
    assert data <= len(slots) * sum(width + 16 for width in widths), "each row and its place in a table, nothing more"
    other = buffer(LazyTensorStorage(MANY))
    other.loads(tmp_path / "save")
    assert read_ids(other[:]) == [i + MANY if i % 97 == 0 else i for i in range(MANY)]


def test_nothing_new_writes_no_rows(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(100))
    fill(rb, range(50))
    rb.dumps(tmp_path / "save")
    before = files(tmp_path / "save")
    rb.dumps(tmp_path / "save", incremental=True)
    assert set(files(tmp_path / "save")) == set(before)


def test_a_long_chain_is_folded_and_never_outweighs_its_base(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(500))
    fill(rb, range(500))
    path = tmp_path / "save"
    rb.dumps(path)
    longest, whole = 0, sum(files(path).values())
    for turn in range(3 * MOST_PATCHES):
        fill(rb, range(500 + 10 * turn, 510 + 10 * turn))
        rb.dumps(path, incremental=True)
        longest = max(longest, chain(path))
        assert chain(path) <= MOST_PATCHES
        assert sum(files(path).values()) < 2.5 * whole
    assert longest > 3, "no chain grew at all"
    other = buffer(LazyTensorStorage(500))
    other.loads(path)
    same_state(snapshot(other), snapshot(rb))


def patched(path: Path, number: int) -> tuple[Path, int]:
    """Return the file of a patch of packed rows or the first field, and the bytes of its table."""
    arrays = CheckpointReader(path, format_name="ostinato-buffer").arrays
    record = next(record for record in arrays.values() if record.patches)
    return path / record.patches[number].file, 16 * record.patches[number].runs


@pytest.mark.parametrize("mode", [{}, {"verify": False}, {"mmap": True}])
def test_a_flipped_table_of_rows_is_found_by_every_load_and_by_a_fold(mode: dict[str, Any], tmp_path: Path) -> None:
    rb, path = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4), tmp_path / "save"
    rb.extend({"x": torch.zeros(1000)})
    rb.dumps(path, incremental=True)
    for turn in range(1, MOST_PATCHES + 1):
        rb.extend({"x": torch.full((3,), float(turn))})
        rb.dumps(path, incremental=True)
    rb.extend({"x": torch.ones(3)})
    file, size = patched(path, 5)
    good = file.read_bytes()
    for place in range(size):
        for bit in (1, 64):
            data = bytearray(good)
            data[place] ^= bit
            file.write_bytes(data)
            other = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
            with pytest.raises(DamagedFileError, match=file.name):
                other.loads(path, **mode)
            assert len(other) == 0
            with pytest.raises(DamagedFileError, match=file.name):
                rb.dumps(path, incremental=True)
    file.write_bytes(good)
    rb.dumps(path, incremental=True)
    other = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    other.loads(path, **mode)
    assert torch.equal(other[:]["x"], rb[:]["x"])


def test_a_fold_never_saves_other_rows_than_those_in_memory(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(300), batch_size=4)
    rb.extend({"x": torch.zeros(300, dtype=torch.int64)})
    rb.dumps(tmp_path / "save", incremental=True)
    for turn in range(1, MOST_PATCHES + 1):
        rb.extend({"x": torch.full((2,), turn)})
        rb.dumps(tmp_path / "save", incremental=True)
    rb.extend({"x": torch.ones(3, dtype=torch.int64)})
    for number in range(0, MOST_PATCHES, 5):
        nbytes = patched(tmp_path / "save", number)[0].stat().st_size
        for place in range(0, nbytes, 3):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(tmp_path / "save", tmp_path / "copy")
            again = ReplayBuffer(storage=LazyTensorStorage(300), batch_size=4)
            again.loads(tmp_path / "copy")
            again.extend({"x": torch.ones(3, dtype=torch.int64)})
            file, _ = patched(tmp_path / "copy", number)
            data = bytearray(file.read_bytes())
            data[place] ^= 4
            file.write_bytes(data)
            try:
                again.dumps(tmp_path / "copy", incremental=True)
            except DamagedFileError:
                continue
            other = ReplayBuffer(storage=LazyTensorStorage(300), batch_size=4)
            other.loads(tmp_path / "copy")
            assert torch.equal(other[:]["x"], rb[:]["x"]), f"byte {place} of patch {number}"


def test_after_a_load_a_save_goes_on_from_what_was_loaded(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(100))
    fill(rb, range(80))
    rb.dumps(tmp_path / "save")
    other = buffer(LazyTensorStorage(100))
    other.loads(tmp_path / "save")
    fill(other, range(80, 83))
    other.dumps(tmp_path / "save", incremental=True)
    assert chain(tmp_path / "save") == 1
    third = buffer(LazyTensorStorage(100))
    third.loads(tmp_path / "save")
    assert read_ids(third[:]) == list(range(83))


@pytest.mark.parametrize("foreign", ["another buffer", "a load", "another storage", "another save"])
def test_what_the_save_does_not_go_on_from_is_written_whole(foreign: str, tmp_path: Path) -> None:
    rb, path = buffer(LazyTensorStorage(100)), tmp_path / "save"
    fill(rb, range(80))
    rb.dumps(path)
    if foreign == "another buffer":
        rb = buffer(LazyTensorStorage(100))
        fill(rb, range(1000, 1080))
    elif foreign == "a load":
        rb.load_state_dict(rb.state_dict())
    elif foreign == "another storage":
        rb.set_storage(LazyTensorStorage(100))
        fill(rb, range(50))
    else:
        second = buffer(LazyTensorStorage(100))
        fill(second, range(2000, 2080))
        second.dumps(path)
        fill(rb, [80])
    rb.dumps(path, incremental=True)
    assert chain(path) == 0
    other = buffer(LazyTensorStorage(100))
    other.loads(path)
    same_state(snapshot(other), snapshot(rb))


def test_two_directories_in_turn_are_two_chains(tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(1000))
    fill(rb, range(1000))
    for turn in range(4):
        rb.dumps(tmp_path / str(turn % 2), incremental=True)
        fill(rb, range(turn, turn + 2))
    assert chain(tmp_path / "0") == chain(tmp_path / "1") == 1


@pytest.mark.parametrize("view", ["slice", "field", "columns"])
def test_after_a_view_was_handed_out_everything_is_written(view: str, tmp_path: Path) -> None:
    rb = buffer(LazyTensorStorage(100))
    fill(rb, range(80))
    rb.dumps(tmp_path / "save")
    seen = {
        "slice": lambda: rb[2:5]["id"],
        "field": lambda: rb.storage["id"],
        "columns": lambda: rb.storage.columns[("id",)],  # type: ignore[attr-defined]
    }[view]()
    rb.dumps(tmp_path / "save", incremental=True)
    seen.fill_(-5)
    rb.dumps(tmp_path / "save", incremental=True)
    other = buffer(LazyTensorStorage(100))
    other.loads(tmp_path / "save")
    same_state(snapshot(other), snapshot(rb))
    assert bool((other[:]["id"] == -5).any())


def test_priorities_are_written_by_the_block(tmp_path: Path) -> None:
    def make() -> PrioritizedReplayBuffer:
        return PrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(MANY), generator=torch.Generator(), batch_size=4
        )

    rb = make()
    fill(rb, range(MANY))
    rb.dumps(tmp_path / "save")
    before = files(tmp_path / "save")
    rb.update_priority(torch.tensor([3, 5]), torch.tensor([9.0, 8.0]))
    rb.dumps(tmp_path / "save", incremental=True)
    added = [size for name, size in files(tmp_path / "save").items() if name not in before]
    assert 0 < sum(added) < 3 * 70_000, "of priorities and values one block of 64 KiB each"
    other = make()
    other.loads(tmp_path / "save")
    same_state(snapshot(other), snapshot(rb))
    assert other.sample()["id"].tolist() == rb.sample()["id"].tolist()


def test_single_copies_and_late_fields_are_in_the_chain(tmp_path: Path) -> None:
    def make() -> ReplayBuffer:
        return buffer(LazyTensorStorage(200, single_copy=True))

    def steps(first: int, count: int) -> dict[str, Any]:
        ids = torch.arange(first, first + count)
        return {"obs": ids[:, None].float(), "next": {"obs": ids[:, None].float() + (ids[:, None] % 7 != 0)}}

    rb = make()
    rb.extend(steps(0, 150))
    for turn in range(4):
        rb.dumps(tmp_path / "save", incremental=True)
        other = make()
        other.loads(tmp_path / "save")
        same_state(snapshot(other), snapshot(rb))
        rb.extend(steps(150 + 30 * turn, 30))


def test_ensembles_save_what_has_changed_of_each_member(tmp_path: Path) -> None:
    def make() -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(*(buffer(LazyTensorStorage(300)) for _ in range(2)), batch_size=4)

    both = make()
    for i in range(2):
        fill(both[i], range(300 * i, 300 * i + 300))
    both.dumps(tmp_path / "save")
    before = files(tmp_path / "save")
    fill(both[1], range(1000, 1003))
    both.dumps(tmp_path / "save", incremental=True)
    added = [name for name in files(tmp_path / "save") if name not in before]
    assert added
    assert all(name.startswith("1_") for name in added), "of the other member nothing is written"
    other = make()
    other.loads(tmp_path / "save")
    same_state(_plain(other.state_dict()), _plain(both.state_dict()))


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "members": [dict(member) for member in state["members"]]}
