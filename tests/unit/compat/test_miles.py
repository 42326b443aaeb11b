"""The buffer for miles, in a loop with the contract of the original."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ostinato.compat.miles import DataBuffer
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass
class Sample:
    """As that of miles: fields, a status, and the oldest version of its tokens."""

    class Status(enum.Enum):
        COMPLETED = "completed"
        ABORTED = "aborted"

    tokens: list[int]
    reward: float = 0.0
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight_versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def oldest_weight_version(self) -> int | None:
        return min(self.weight_versions, default=None)


def opened(folder: Path, unused: list[Any], most: int | None = 2) -> DataBuffer:
    kind = type("Mine", (DataBuffer,), {"path": folder, "sample": f"{__name__}:Sample"})
    made: DataBuffer = kind(
        SimpleNamespace(args=SimpleNamespace(max_weight_staleness=most), unused_handler_fn=unused.append)
    )
    return made


def group(number: int, version: int, status: Sample.Status = Sample.Status.COMPLETED) -> Any:
    samples = [Sample([number] * 3, number / 2, status, {"k": [1]}, [version, version + 1]) for _ in range(2)]
    return SimpleNamespace(prompt_group=[Sample([number])], group=[samples[:1], samples[1:]], weight_version=version)


def numbers(*inputs: Any) -> list[int]:
    return [each.prompt_group[0].tokens[0] for each in inputs]


def test_groups_come_back_whole_and_in_order_and_those_not_used_go_to_the_handler(tmp_path):
    unused: list[Any] = []

    async def loop() -> None:
        buffer = opened(tmp_path, unused)
        waiting = asyncio.create_task(buffer.get(1))
        await asyncio.sleep(0)
        new = group(0, 0)
        new.group[0][0].weight_versions = new.group[1][0].weight_versions = []
        await buffer.put(new)
        assert vars(await waiting) == vars(new)
        await buffer.put(group(1, 0, Sample.Status.ABORTED))
        await buffer.put(group(2, 0))
        await buffer.put(group(3, 3))
        assert numbers(await buffer.get(4)) == [3]
        found = buffer.get_metrics()
        assert {name.removeprefix("rollout/fully_async/"): value for name, value in found.items()} == {
            "queue_size": 0, "aborted_groups_filtered": 1, "stale_groups_filtered": 1, "avg_staleness": 0.5,
            "max_staleness": 1,
        }  # fmt: skip
        assert [each[0].tokens[0] for each in unused] == [1, 2]
        buffer.groups.close()

    asyncio.run(loop())


def test_a_restart_hands_out_what_was_not_trained_and_nothing_else(tmp_path):
    async def first() -> None:
        buffer = opened(tmp_path, [])
        for number in range(4):
            await buffer.put(group(number, 1))
        assert numbers(await buffer.get(1), await buffer.get(1)) == [0, 1]
        assert numbers(await buffer.get(2)) == [2]  # 0 and 1 are trained
        buffer.groups.close()

    async def second() -> None:
        buffer = opened(tmp_path, [])
        assert sorted(numbers(await buffer.get(2), await buffer.get(2))) == [2, 3]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.get(2), 0.05)
        buffer.groups.close()

    asyncio.run(first())
    asyncio.run(second())
    with pytest.raises(OptionError, match="path"):
        DataBuffer(SimpleNamespace(args=None, unused_handler_fn=None))
