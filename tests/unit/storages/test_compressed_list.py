"""CompressedListStorage: rows come back bit for bit, memory and checkpoints hold compressed bytes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from ostinato import CompressedListStorage, ReplayBuffer
from ostinato.durable.codecs import has_zstd
from ostinato.errors import CheckpointError, KindError, OptionError

from ...tags import same_state

CODECS = ["zlib", pytest.param("zstd", marks=pytest.mark.skipif(not has_zstd(), reason="needs ostinato[zstd]"))]


@tensorclass
class Seen:
    """Numbers of any length."""

    x: torch.Tensor


def buffer(codec: Any = "zlib", **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=CompressedListStorage(20, codec=codec, **options), batch_size=4, collate_fn=list)


def plain(value: Any) -> Any:
    """Return a row with arrays and tensorclasses as tensors and dicts."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Seen):
        return value.to_tensordict()  # type: ignore[attr-defined]
    return value.resolve_conj() if isinstance(value, torch.Tensor) else value


def check(found: list[Any], wanted: list[Any]) -> None:
    assert [type(row) for row in found] == [type(row) for row in wanted]
    same_state([*map(plain, found)], [*map(plain, wanted)])


def rows() -> list[Any]:
    """One row of each kind."""
    td = TensorDict({"x": torch.arange(6).view(2, 3), "deep": {"y": torch.rand(2)}, "text": ["a", "b"]}, [2])
    return [
        torch.arange(12, dtype=torch.int16).view(3, 4),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(7).to(torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(24.0).view(4, 6).t(),
        np.arange(5, dtype=np.uint16)[::-1],
        td,
        Seen(x=torch.arange(3), batch_size=[]),  # type: ignore[call-arg]
        {"a": torch.ones(2), "b": [torch.zeros(1), (torch.ones(2), "text", None)], 3: 4},
        "text",
        7,
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_each_kind_come_back(codec):
    rb, given = buffer(codec), rows()
    rb.extend(given)
    check(rb[:], given)
    check([rb[i] for i in range(len(rb))], given)
    order = torch.randperm(len(given)).tolist()
    check(rb[torch.tensor(order)], [given[i] for i in order])
    batch, info = rb.sample(8, return_info=True)
    check(batch, [given[i] for i in info["index"].tolist()])
    check(pickle.loads(pickle.dumps(rb))[:], given)
    given[0] += 1
    rb[1].mul_(5)
    check(rb[:2], [given[0] - 1, given[1]])


@pytest.mark.parametrize("other", CODECS)
def test_memory_and_checkpoints_hold_compressed_bytes(other, tmp_path):
    rb, loaded, given = buffer("zlib"), buffer(other), [torch.zeros(100_000), *rows()]
    rb.extend(given)
    assert 0 < rb.storage.bytes() == rb.storage.nbytes < 5_000  # type: ignore[attr-defined]
    rb.dumps(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 100_000
    loaded.loads(tmp_path)
    check(loaded[:], given)
    rb.empty()
    assert rb.storage.nbytes == 0


def test_objects_are_pickled_only_if_allowed(tmp_path):
    rb = buffer()
    rb.extend([{"x": torch.ones(3), "o": {1, 2}}])
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        rb.dumps(tmp_path)
    allowed = buffer(allow_pickle=True)
    allowed.extend([{"x": torch.ones(3), "o": {1, 2}}])
    allowed.dumps(tmp_path)
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        rb.loads(tmp_path)
    allowed.loads(tmp_path)
    assert allowed[0]["o"] == {1, 2}


def test_damaged_states_raise():
    storage, other = CompressedListStorage(5), CompressedListStorage(5)
    storage.set(range(2), [torch.ones(3), torch.ones(4)])
    leaf = ["leaf", 0, "float32", [3], False]
    items: list[Any] = [["leaf", 9, *leaf[2:]], [*leaf[:2], "float99", *leaf[3:]], ["bomb", 0], 3]
    state = storage.state_dict()
    wrong = [{**state, "items": [item, *state["items"][1:]]} for item in items]
    for damaged in (*wrong, {**state, "columns": {**state["columns"], "ends": torch.tensor([5, 2])}}):
        with pytest.raises(CheckpointError):
            other.load_state_dict(damaged)
        assert len(other) == 0


def test_functions_of_the_user(tmp_path):
    calls = []

    def decompress(blob: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        calls.append(metadata)
        return blob.to(metadata["dtype"])

    options = {"compression_fn": lambda tensor: tensor.to(torch.uint8), "decompression_fn": decompress}
    rb = buffer(**options)
    rb.extend([torch.tensor([1.0, 2.0]), {"x": torch.tensor([7])}])
    assert rb.storage.bytes() == 3  # type: ignore[attr-defined]
    assert torch.equal(rb[0], torch.tensor([1.0, 2.0]))
    assert calls[0]["type"] == "tensor"
    assert calls[0]["shape"] == torch.Size([2])
    rb.dumps(tmp_path)
    again = buffer(**options)
    again.loads(tmp_path)
    assert torch.equal(again[1]["x"], torch.tensor([7]))
    with pytest.raises(CheckpointError):
        buffer().loads(tmp_path)


def test_wrong_options_and_rows_raise():
    with pytest.raises(OptionError, match="compression_level of zlib must be an integer from 0 to 9"):
        CompressedListStorage(5, codec="zlib", compression_level=22)
    with pytest.raises(OptionError):
        CompressedListStorage(5, codec="lzma")
    with pytest.raises(KindError, match="compression_fn must be a function"):
        CompressedListStorage(3, compression_fn=3)  # type: ignore[arg-type]
    rb = buffer()
    with pytest.raises(KindError):
        rb.extend([torch.ones(3), torch.eye(3).to_sparse()])
    assert len(rb) == 0
    with pytest.raises(KindError):
        CompressedListStorage(5).to_bytestream({"x": 1})
    assert CompressedListStorage(5).to_bytestream(np.arange(3, dtype=np.uint8)) == b"\0\1\2"
