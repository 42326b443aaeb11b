"""The memory for skrl, compared with a log of what was added."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import PrioritizedSampler
from ostinato.compat.skrl import RandomMemory
from ostinato.errors import EmptyBufferError, KeyMissingError, OptionError, UsageError

GAMMA = 0.5
FLAGS = ("terminated", "truncated")
NAMES = ["observations", "next_observations", "rewards", *FLAGS]


def make(memory_size: int = 6, num_envs: int = 1, *, flags: tuple[str, ...] = FLAGS, **options: Any) -> RandomMemory:
    memory = RandomMemory(memory_size=memory_size, num_envs=num_envs, device="cpu", **options)
    for name in NAMES[:3]:
        assert memory.create_tensor(name, size=1, dtype=torch.float32)
    for name in flags:
        assert memory.create_tensor(name, size=1, dtype=torch.bool)
    return memory


class Log:
    """Steps of several environments, whose observations are serial numbers; the plain model of the memory."""

    def __init__(self, seed: int, steps: int, num_envs: int) -> None:
        random = torch.Generator("cpu").manual_seed(seed)
        self.rows: list[list[dict[str, float]]] = []
        serial, now = num_envs, list(range(num_envs))
        for _ in range(steps):
            self.rows.append([])
            for env in range(num_envs):
                kind = int(torch.randint(0, 6, (1,), generator=random, device="cpu"))
                row = {"observations": now[env], "next_observations": serial, "rewards": float(serial % 7)}
                self.rows[-1].append({**row, "terminated": kind == 0, "truncated": kind == 1})
                now[env], serial = (serial + 1, serial + 2) if kind < 2 else (serial, serial + 1)

    def fill(self, memory: RandomMemory, first: int = 0, last: int | None = None) -> None:
        for step in self.rows[first:last]:
            memory.add_samples(**{name: torch.tensor([[row[name]] for row in step], device="cpu") for name in NAMES})

    def follow(self, start: float, length: int, oldest: int) -> list[dict[str, float]]:
        """The rows of the episode of one environment from an observation on, of those present."""
        for env in range(len(self.rows[0])):
            column = [step[env] for step in self.rows]
            at = next((i for i, row in enumerate(column) if row["observations"] == start), None)
            if at is not None:
                assert at >= oldest, "a row that was replaced"
                ends = [i for i in range(at, len(column)) if column[i]["terminated"] or column[i]["truncated"]]
                return column[at : min([at + length, len(column), *(i + 1 for i in ends)])]
        raise AssertionError(start)


@given(
    st.integers(0, 10**6), st.integers(1, 3), st.integers(4, 20), st.integers(1, 3), st.booleans(), st.integers(0, 4)
)
def test_sequences_are_rows_of_one_episode_that_follow_each_other(
    seed,
    num_envs,
    steps,
    length,
    replacement,
    early,
):
    log, memory = Log(seed, steps, num_envs), make(6, num_envs, replacement=replacement)
    log.fill(memory, 0, early)
    if length > 1 and early:
        memory._reader(length)  # numbers episodes from here on
    log.fill(memory, early, steps)
    present = [row["observations"] for step in log.rows[max(0, steps - 6) :] for row in step]
    oldest = max(0, steps - 6)
    starts = {x for x in present if len(log.follow(x, length, oldest)) == length}
    if not starts:
        with pytest.raises(EmptyBufferError):
            memory.sample(NAMES, batch_size=4, sequence_length=length)
        return
    seen = set()
    for _ in range(1 if not replacement else 20):
        found = memory.sample(NAMES, batch_size=100, sequence_length=length)[0]
        columns = dict(zip(NAMES, (x.view(-1, length) for x in found if x is not None), strict=True))
        for i, first in enumerate(columns["observations"][:, 0].tolist()):
            seen.add(first)
            rows = log.follow(first, length, oldest)
            for name in NAMES:
                assert columns[name][i].tolist() == [row[name] for row in rows]
        if not replacement:
            assert len(columns["rewards"]) == len(starts)
    assert seen == starts
    again = memory.sample_by_index(NAMES, indexes=memory.get_sampling_indexes())[0]  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [FLAGS, ("terminated",)])
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 20), st.integers(1, 4))
def test_n_step_transitions_end_with_their_episode_and_at_the_newest_row(flags, seed, num_envs, steps, n):
    """Also where the agent stores no time limits: the next observation is not the one that follows."""
    log, memory = Log(seed, steps, num_envs), make(6, num_envs, flags=flags, n_steps=n, discount_factor=GAMMA)
    log.fill(memory)
    found = memory.sample([*NAMES[:4], "discounts"], batch_size=100)[0]
    now, after, rewards, terminated, discounts = (x.flatten().tolist() for x in found if x is not None)
    assert len(now) == min(steps, 6) * num_envs
    for i, start in enumerate(now):
        rows = log.follow(start, n, max(0, steps - 6))
        assert after[i] == rows[-1]["next_observations"]
        assert terminated[i] == rows[-1]["terminated"]
        assert rewards[i] == sum(GAMMA**k * row["rewards"] for k, row in enumerate(rows))
        assert discounts[i] == GAMMA ** len(rows)


def test_sequences_may_continue_in_the_next_episode():
    log, memory = Log(3, 9, 1), make(6, cross_episodes=True)
    log.fill(memory)
    found: Any = memory.sample(["observations"], batch_size=9, sequence_length=4)[0][0]
    rows = [step[0]["observations"] for step in log.rows[3:]]
    assert sorted(found.view(-1, 4).tolist()) == [rows[i : i + 4] for i in range(3)]


def test_priorities_follow_the_last_sample():
    memory = make(sampler=partial(PrioritizedSampler, 6, alpha=1.0, beta=1.0, eps=0.0))
    Log(0, 6, 1).fill(memory)
    found: Any = memory.sample(["rewards", "priority_weight"], batch_size=64)[0]
    assert found[0].shape == found[1].shape == (64, 1)
    indexes: Any = memory.get_sampling_indexes()
    memory.update_priority((indexes == 2).float())
    memory.sample(["rewards"], batch_size=64)
    indexes = memory.get_sampling_indexes()
    assert indexes.unique().tolist() == [2]
    memory.sample(["rewards"], batch_size=2, sequence_length=2)  # sequences have priorities of their own


def test_rows_come_by_step_by_part_and_by_several_steps():
    parts: Any = RandomMemory(memory_size=2, num_envs=3, device="cpu")
    parts.create_tensor("x", size=1)
    parts.create_tensor("n", size=(1, 2), dtype=torch.int32, keep_dimensions=True)
    parts.add_samples(x=torch.tensor([[1.0], [2.0]], device="cpu"), other=torch.ones(2, 1, device="cpu"))
    assert (len(parts), parts.env_index, parts.memory_index) == (2, 2, 0)
    assert len(parts.sample(["x"], batch_size=5)[0][0]) == 2
    with pytest.raises(OptionError):
        parts.add_samples(x=torch.ones(2, 1, device="cpu"))
    parts.add_samples(x=torch.tensor([3.0], device="cpu"), n=None)
    assert (len(parts), parts.env_index, parts.memory_index) == (3, 0, 1)
    x, n, states = parts.sample(["x", "n", "states"], batch_size=9)[0]
    assert (sorted(x.flatten().tolist()), n.shape, states) == ([1.0, 2.0, 3.0], (3, 1, 2), None)
    single: Any = RandomMemory(memory_size=4, device="cpu")
    single.create_tensor("x", size=1)
    for first in (0, 3):  # over the end of the ring
        single.add_samples(x=torch.arange(first, first + 3.0, device="cpu").unsqueeze(1))
    assert [len(x) for (x,) in single.sample(["x"], batch_size=4, mini_batches=3)] == [2, 1, 1]
    assert single.sample_all(["x"])[0][0].flatten().tolist() == [4.0, 5.0, 2.0, 3.0]
    assert single.sample_all(["x"], sequence_length=2)[0][0].flatten().tolist() == [2.0, 3.0, 4.0, 5.0]
    single.set_tensor_by_name("x", torch.zeros(4, 1, 1, device="cpu"))
    assert single.sample(["x"], batch_size=1)[0][0] == 0
    single.reset()
    assert (len(single), single.memory_index) == (0, 0)


@pytest.mark.parametrize("form", ["pt", "npz", "csv"])
def test_a_full_ring_is_exported_before_rows_are_replaced(tmp_path, form):
    memory, other, log = make(4, export=True, export_format=form, export_directory=str(tmp_path)), make(4), Log(1, 9, 1)
    log.fill(memory)
    memory.save(str(tmp_path), format=form)
    first, second, last = sorted((tmp_path / "memories").iterdir())
    if form == "csv":
        assert [len(file.read_text().splitlines()) for file in (first, second, last)] == [5, 5, 5]
        with pytest.raises(NotImplementedError):
            memory.load(str(second))
        return
    for path, rows in ((second, log.rows[4:8]), (last, log.rows[5:])):
        other.load(str(path))
        assert other.filled
        assert other.tensors_view["rewards"].flatten().tolist() == [row["rewards"] for (row,) in rows]
    other = RandomMemory(memory_size=4, device="cpu")
    other.create_tensor("more", size=1)
    with pytest.raises(KeyMissingError, match="more"):
        other.load(str(first))


def test_wrong_calls_raise_what_skrl_raises(tmp_path):
    memory, one = make(), torch.ones(1, 1, device="cpu")
    for call in (
        partial(make, export_format="zip"),
        partial(RandomMemory, memory_size=3, n_steps=2),
        partial(memory.create_tensor, "rewards", size=2),
        partial(memory.create_tensor, "y", size=1, keep_dimensions=True),
        partial(memory.add_samples, rewards=one.expand(1, 2)),
        memory.add_samples,
        partial(memory.load, str(tmp_path / "a.zip")),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(KeyError):
        memory.get_tensor_by_name("y")
    with pytest.raises(FileNotFoundError):
        memory.load(str(tmp_path / "a.pt"))
    memory.share_memory()
    memory.add_samples(rewards=one)
    unmade = RandomMemory(memory_size=2)
    for late in (
        memory.share_memory, partial(memory.create_tensor, "y", size=1), partial(memory.update_priority, one),
        partial(unmade.sample, ["x"], batch_size=1),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            late()


def test_sizes_of_spaces():
    spaces = pytest.importorskip("gymnasium.spaces")
    memory = RandomMemory(memory_size=1, device="cpu")
    both = spaces.Tuple((spaces.Discrete(5), spaces.MultiDiscrete([2, 3])))
    memory.create_tensor("a", size=spaces.Dict(x=spaces.Box(0, 1, (2, 3)), y=both))
    assert memory.get_tensor_by_name("a").shape == (1, 1, 9)
