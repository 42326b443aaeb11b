"""Writes checkpoints with TorchRL, and what must come out of them: `python tests/parity/_write_torchrl.py DIRECTORY`.

The ones in `tests/data/torchrl_0_14` were written so. A program of its own, since it must load TorchRL's compiled part
before anything else does: functions that it lacks in a newer torch are then looked for when they are called (never),
not when it is loaded.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class Thing:
    """An object that is no plain value."""

    def __init__(self) -> None:
        self.number = 3


def lists(rows: Any) -> Any:
    """Turn rows into plain values, without the place that TorchRL writes into them."""
    if hasattr(rows, "to_dict"):
        rows = rows.exclude("index").to_dict()
    if isinstance(rows, dict):
        return {str(key): lists(value) for key, value in rows.items()}
    if isinstance(rows, (list, tuple)):
        return {str(i): lists(value) for i, value in enumerate(rows)}
    return rows.tolist()


def main(root: Path) -> None:
    """Write all cases."""
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    import torch
    import torchrl._torchrl  # noqa: F401
    from tensordict import TensorDict
    from torchrl import data as lib

    expected: dict[str, Any] = {}

    def rows(count: int, *lanes: int) -> TensorDict:
        number = torch.arange(count * max(1, *lanes, 1), dtype=torch.float32).reshape(count, *lanes)
        data = {"obs": torch.stack((number, -number), -1), "next": {"reward": number / 2, "id": number.long()}}
        return TensorDict(data, [count, *lanes])

    def save(name: str, rb: Any, *, samples: bool = True) -> None:
        rb.dumps(root / name)
        want = {"rows": lists(rb[:]), "rows_count": len(rb), "cursor": int(rb._writer._cursor)}
        if samples:
            want["samples"] = [lists(rb.sample()) for _ in range(5)]
        expected[name] = want

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(8), batch_size=4, generator=seeded())
    rb.extend(rows(11))
    rb.sample()
    save("ring", rb)

    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(8), batch_size=4, generator=seeded())
    rb.extend(rows(5))
    save("mapped", rb)

    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10, ndim=2), dim_extend=0, batch_size=4)
    for start in (0, 3):
        rb.extend(rows(6, 2)[start : start + 3])
    save("lanes", rb, samples=False)
    expected["lanes"]["rows"] = lists(rb._storage._storage)

    rb = lib.TensorDictReplayBuffer(storage=lib.LazyMemmapStorage(10, ndim=2), dim_extend=0, batch_size=4)
    rb.extend(rows(2, 2))
    save("lanes_part", rb, samples=False)

    tree = {
        "a": torch.arange(4),
        "b": (torch.zeros(4, 2), [torch.ones(4)]),
        30: torch.arange(4) * 2.0,
        "c.d": torch.ones(4),
    }
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(6), batch_size=2, generator=seeded())
    rb.extend(tree)
    save("tree", rb)

    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(6), batch_size=2, prefetch=2)
    rb.extend(torch.arange(8.0).to(torch.bfloat16))
    rb.sample()
    save("tensor", rb, samples=False)

    rb = lib.ReplayBuffer(
        storage=lib.LazyTensorStorage(8), sampler=lib.SamplerWithoutReplacement(drop_last=True), batch_size=3
    )
    rb.extend(rows(8))
    drawn = rb.sample()["next", "id"].tolist()
    save("epochs", rb, samples=False)
    expected["epochs"]["drawn"] = drawn

    for name, alpha in (("prioritized", 0.7), ("uniform", 0.0)):
        sampler = lib.PrioritizedSampler(8, alpha, 0.5)
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(8), sampler=sampler, batch_size=4)
        rb.extend(rows(11))
        rb.update_priority(torch.arange(6), torch.arange(1.0, 7.0))
        rb.extend(rows(1))
        save(name, rb, samples=False)
        values = torch.tensor([sampler._sum_tree[i] for i in range(8)], dtype=torch.float64)
        index = torch.arange(8)
        weights = torch.pow(values / values.min(), -0.5)
        expected[name] |= {"values": values.tolist(), "weights": weights[index].tolist()}
        expected[name]["default"] = float(sampler._max_priority[0])

    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(6), batch_size=2)
    rb.register_save_hook(lib.TED2Flat())
    steps = torch.arange(6.0)
    ends = steps == 2
    flags = {name: torch.zeros(6, 1, dtype=torch.bool) for name in ("done", "terminated")}
    after = {"obs": torch.where(ends, -steps, steps + 1), "reward": steps.unsqueeze(-1)}
    after |= {name: ends.unsqueeze(-1) for name in flags}
    rb.extend(TensorDict({"obs": steps, **flags, "next": after}, [6])[:5])
    save("flat", rb, samples=False)

    rb = lib.TensorDictReplayBuffer(storage=lib.ListStorage(3), batch_size=2, generator=seeded())
    rb.extend(rows(4))
    torch.save(rb.state_dict(), root / "list.pt")
    items = [lists(rb._storage[i]) for i in range(3)]
    expected["list.pt"] = {"items": items, "cursor": 1, "samples": [lists(rb.sample()) for _ in range(5)]}

    rb = lib.ReplayBuffer(storage=lib.ListStorage(9), batch_size=2, collate_fn=list)
    rb.extend(["a", {"text": "b", "x": torch.ones(2)}, 3])
    torch.save(rb.state_dict(), root / "plain.pt")
    rb.extend([Thing()])
    torch.save(rb.state_dict(), root / "objects.pt")
    (root / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
