"""The trajectory store against a plain Python model: any order of adds, reads, clears, saves, loads and reopenings."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ostinato import TrajectoryReplayBuffer
from ostinato.errors import EmptyBufferError, OptionError
from ostinato.tools import verify

from ..unit.trajectories.rollouts import check_batch, rollout


class TrajectoryMachine(RuleBasedStateMachine):
    """One buffer, one model: `model[id]` is (serial number of the rollout, transitions), oldest first."""

    auto_save: bool

    @initialize(
        form=st.sampled_from(["pt", "safetensors", "pkl"]),
        cache=st.integers(0, 3),
        window=st.integers(0, 3),
        files=st.sampled_from([1, 2, 256]),
    )
    def begin(self, form: str, cache: int, window: int, files: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name)
        self.form, self.window = form, window
        self.options: dict[str, Any] = {
            "enable_cache": cache > 0,
            "cache_size": max(cache, 1),
            "sample_window_size": window,
            "auto_save": self.auto_save,
            "auto_save_path": self.root / "own",
            "allow_pickle": True,
            "save_queue_size": 2,
            "max_open_files": files,
        }
        self.rb = TrajectoryReplayBuffer(trajectory_format=form, **self.options)
        self.model: dict[int, tuple[int, int]] = {}
        self.listed: dict[int, tuple[int, int]] = {}  # what the own directory lists, with auto_save
        self.at_home: set[int] = set()  # of the ids in the model those whose files lie there
        self.saved: dict[Path, dict[int, tuple[int, int]]] = {}
        self.highest = -1  # of all ids ever seen in this buffer or directory
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "rb"):
            self.rb.close()
            del self.rb
            self.directory.cleanup()

    @property
    def in_window(self) -> list[tuple[int, int]]:
        rows = list(self.model.values())
        return rows[-self.window :] if self.window else rows

    @rule(count=st.integers(1, 3), length=st.integers(1, 3), envs=st.integers(1, 3), epochs=st.integers(0, 2))
    def add(self, count: int, length: int, envs: int, epochs: int) -> None:
        steps = length * max(epochs, 1)
        more: dict[str, Any] = {"extra": {"note": {}, "words": ["a", None, 1.5]}}
        numbers = range(self.number, self.number + count)
        self.number += count
        future = self.rb.add_trajectories([rollout(number, steps, envs, epochs=epochs, **more) for number in numbers])
        fresh = self.rb.trajectory_ids[len(self.model) :]
        assert len(fresh) == count
        assert min(fresh) > self.highest, "an id was given twice"
        self.highest = max(fresh)
        rows = {number: (serial, steps * envs) for number, serial in zip(fresh, numbers, strict=True)}
        self.model |= rows
        if future is not None:
            assert future.result(20) == fresh
            self.listed |= rows
            self.at_home |= set(rows)

    @rule(count=st.integers(1, 60), replace=st.booleans())
    def sample(self, count: int, replace: bool) -> None:
        total = sum(rows for _, rows in self.in_window)
        if not self.model:
            with pytest.raises(EmptyBufferError):
                self.rb.sample(count, replace=replace)
        elif not replace and count > total:
            with pytest.raises(OptionError):
                self.rb.sample(count, replace=replace)
        else:
            drawn = check_batch(self.rb.sample(count, replace=replace))
            assert len(drawn) == count
            assert {serial // 1000 for serial in drawn} <= {number for number, _ in self.in_window}
            assert replace or len(set(drawn)) == count

    @precondition(lambda self: self.model)
    @rule()
    def sample_everything(self) -> None:
        total = sum(rows for _, rows in self.in_window)
        expected = [1000 * number + row for number, rows in self.in_window for row in range(rows)]
        assert sorted(check_batch(self.rb.sample(total, replace=False))) == sorted(expected)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def load_one(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.model)))
        whole = self.rb.load_trajectory(number)
        assert whole.rewards is not None
        assert whole.rewards[0, 0, 0] == 1000 * self.model[number][0]
        assert whole.extra == {"note": {}, "words": ["a", None, 1.5]}
        whole.rewards.zero_()
        whole.extra["words"].clear()

    @rule()
    def clear(self) -> None:
        self.listed = {number: rows for number, rows in self.listed.items() if number not in self.at_home}
        self.rb.clear()
        self.model, self.at_home = {}, set()

    @rule(verb=st.sampled_from(["close", "flush", "clear_cache"]))
    def settle(self, verb: str) -> None:
        getattr(self.rb, verb)()
        stats = self.rb.get_stats()
        assert stats["pending_saves"] == 0
        assert verb != "clear_cache" or stats["cached_trajectories"] == 0

    @rule()
    def save(self) -> None:
        path = self.root / f"saved-{len(self.saved)}"
        self.rb.save_checkpoint(path)
        self.saved[path] = dict(self.model)
        twin = TrajectoryReplayBuffer(**{**self.options, "auto_save": False, "auto_save_path": None})
        twin.load_checkpoint(path)
        assert twin.trajectory_ids == list(self.model)
        if self.model:
            assert torch.equal(twin.sample(9)["rewards"], self.rb.sample(9)["rewards"])
        assert not verify(path, allow_pickle=True).damage

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), ranks=st.integers(1, 3))
    def load(self, data: st.DataObject, ranks: int) -> None:
        path = data.draw(st.sampled_from(list(self.saved)))
        rank = data.draw(st.integers(0, ranks - 1))
        self.rb.load_checkpoint(path, is_distributed=True, local_rank=rank, world_size=ranks)
        ids = list(self.saved[path])
        share = ids[rank * len(ids) // ranks : (rank + 1) * len(ids) // ranks]
        self.model, self.at_home = {number: self.saved[path][number] for number in share}, set()

    @precondition(lambda self: self.auto_save and (self.root / "own").exists())
    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        """Begin anew from the own directory, closed, or as a crash leaves it."""
        self.rb.flush()
        if crash:
            left = self.root / "left"
            shutil.copytree(self.root / "own", left)
            self.rb.close()
            shutil.rmtree(self.root / "own")
            left.rename(self.root / "own")
            (self.root / "own" / ".ostinato.lock").unlink(missing_ok=True)
        else:
            self.rb.close()
        self.rb = TrajectoryReplayBuffer(trajectory_format=self.form, **self.options)
        self.rb.load_checkpoint(self.root / "own")
        self.model, self.at_home = dict(self.listed), set(self.listed)

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "rb"):
            return
        assert self.rb.trajectory_ids == list(self.model)
        assert len(self.rb) == self.rb.size == len(self.model)
        assert self.rb.total_samples == sum(rows for _, rows in self.model.values())
        stats = self.rb.get_stats()
        assert stats["window_samples"] == sum(rows for _, rows in self.in_window)
        assert stats["cached_trajectories"] <= (self.options["cache_size"] if self.options["enable_cache"] else 0)
        assert stats["open_files"] <= self.options["max_open_files"]


@pytest.mark.timeout(1800)  # the slow profile takes minutes
@pytest.mark.parametrize("auto_save", [False, True])
def test_trajectories_follow_the_model(auto_save):
    machine = type("Machine", (TrajectoryMachine,), {"auto_save": auto_save})
    profile = settings.get_profile(settings.get_current_profile_name())
    examples = profile.max_examples // 4 if auto_save else profile.max_examples  # syncs take their time
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=examples))
