"""A process with TRL: its batches of the samples in a file, and its collator on rows that are given there."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def main(given: Path, written: Path) -> None:
    """Write the rows that TRL makes, its seconds, and the tensors of the rows that are given."""
    trainer: Any = import_module("trl.experimental.async_grpo.async_grpo_trainer")
    request: dict[str, Any] = torch.load(given)
    samples, ranks, budget = request["samples"], request["ranks"], request["max_tokens"]
    collator = trainer.DataCollatorForRollout(0, ranks, token_budget=budget)
    begun = time.perf_counter()
    batcher = trainer.TokenBudgetBatcher(samples, ranks, budget, defaultdict(list))
    made = [(rows, collator.torch_call([rows])) for rows in batcher]
    seconds = time.perf_counter() - begun
    collated = []
    for batch in request["plan"]:
        rows = [trainer.TreeRow() for _ in batch]
        for row, numbers in zip(rows, batch, strict=True):
            for number in numbers:
                row.add(samples[number])
        collated.append(collator.torch_call([rows]))
    torch.save({"batches": len(made), "seconds": seconds, "collated": collated}, written)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
