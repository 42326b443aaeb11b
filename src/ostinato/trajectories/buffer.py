"""`TrajectoryReplayBuffer`: the public face of the trajectory store. Where trajectories are: `store.py`."""

from __future__ import annotations

import copy
import os
import time
import warnings
import weakref
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, final

from ostinato.core.kinds import require_eager
from ostinato.durable.files import new_token
from ostinato.durable.tensorfile import check_format, check_tree
from ostinato.durable.trees import flatten
from ostinato.errors import CheckpointError, DamagedFileError, EmptyBufferError, KindError, OptionError, SlotError
from ostinato.trajectories import checkpoint
from ostinato.trajectories.checkpoint import State, generator_in, numbers
from ostinato.trajectories.gather import gather
from ostinato.trajectories.index import MAX_ID, Entry, Facts, Held, has_listing, read_listing
from ostinato.trajectories.layout import Field, make_form
from ostinato.trajectories.members import Members, common_fields
from ostinato.trajectories.saver import Promise
from ostinato.trajectories.store import Shelf, ShelfOptions
from ostinato.trajectories.trajectory import Trajectory, as_trajectory, owned_tree

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from ostinato.trajectories.layout import Signature
    from ostinato.trajectories.members import Picked

__all__ = ["TrajectoryReplayBuffer"]

_MOST_CHUNKS = 2**31 - 1


@final
class TrajectoryReplayBuffer:
    """Stores batched rollouts on disk and samples single transitions from them.

    Memory holds an index, a bounded cache and a bounded queue, never the data. Sampling reads the rows that were drawn
    and nothing else, by their places in the files. May be used from several threads.

    Example:
        >>> import torch
        >>> from ostinato import Trajectory, TrajectoryReplayBuffer
        >>> rollout = Trajectory(rewards=torch.rand(5, 2, 1), curr_obs={"states": torch.rand(5, 2, 8)})
        >>> with TrajectoryReplayBuffer(auto_save=True, auto_save_path="rollouts") as buffer:
        ...     ids = buffer.add_trajectories([rollout]).result()  # saved, whatever happens from here on
        ...     batch = buffer.sample(num_chunks=4)
        >>> ids, batch["curr_obs"]["states"].shape
        ([0], torch.Size([4, 8]))
    """

    def __init__(
        self,
        seed: int = 1234,
        enable_cache: bool = True,  # noqa: FBT001, FBT002 - the positions are those of the class that it replaces
        cache_size: int = 5,
        sample_window_size: int = 0,
        auto_save: bool = False,  # noqa: FBT001, FBT002
        auto_save_path: str | os.PathLike[str] | None = None,
        trajectory_format: str = "pt",
        *,
        allow_pickle: bool = False,
        cache_bytes: int | None = None,
        save_queue_size: int = 8,
        max_open_files: int = 256,
    ) -> None:
        """Make an empty buffer; nothing is written before the first trajectory.

        Args:
            seed: Seed of the buffer's own generator.
            enable_cache: Keep recent trajectories in memory.
            cache_size: How many, 1 or more.
            sample_window_size: Sample from the most recent trajectories only; 0 means all.
            auto_save: Save each trajectory durably in the background. Otherwise those that leave the cache are spilled
                to a temporary directory, which goes with the buffer: `save_checkpoint` keeps them.
            auto_save_path: Where to save; with `auto_save=False` where the temporary directory is made. None, or the
                empty text that RLinf has for it: a new directory `logs/replay_buffer/...` of the working directory,
                which a warning names once; for spilling the system's temporary directory.
            trajectory_format: `pt`, `pkl` or `safetensors` (the fastest to sample from).
            allow_pickle: Consent to read and write `pkl`: reading such a file runs whatever code it brings.
            cache_bytes: Most bytes of the cache.
            save_queue_size: Trajectories that may wait for the saver; adding waits when so many do.
            max_open_files: Files held open for sampling; never more than half of those that the process may open.

        Raises:
            OptionError: An argument is out of its range, `pkl` without consent, or `auto_save_path` holds
                trajectories of another format.
        """
        check_format(trajectory_format, allow_pickle=allow_pickle)
        _check_counts(cache_size=cache_size, save_queue_size=save_queue_size, max_open_files=max_open_files)
        if type(sample_window_size) is not int or sample_window_size < 0:
            msg = f"sample_window_size must be 0 (all) or more, got {sample_window_size!r}"
            raise OptionError(msg)
        if cache_bytes is not None and (type(cache_bytes) is not int or cache_bytes < 0 or not enable_cache):
            msg = f"cache_bytes must be None, or 0 or more with enable_cache=True, got {cache_bytes!r}"
            raise OptionError(msg)
        if type(seed) is not int or not -(2**63) <= seed < 2**63:
            msg = f"seed must be an integer of 64 bits, got {seed!r}"
            raise OptionError(msg)
        directory = _directory(auto_save_path, trajectory_format, auto_save=auto_save)
        self._window = sample_window_size
        self._state = State(seed, trajectory_format)
        size = cache_size if enable_cache else 0
        options = ShelfOptions(directory, auto_save, size, cache_bytes, save_queue_size, max_open_files, allow_pickle)
        self._shelf = Shelf(options, self._state)
        self._members = Members(sample_window_size)
        self._finalizer = weakref.finalize(self, self._shelf.end)

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self._members)

    def __repr__(self) -> str:
        """Name what it holds."""
        counts = f"{len(self)} trajectories, {self.total_samples} transitions"
        return f"TrajectoryReplayBuffer({counts}, {self._state.format_name})"

    def __enter__(self) -> Self:
        """Return the buffer; `close` is called at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self._members)

    @property
    def total_samples(self) -> int:
        """Number of transitions: the sum of T * B."""
        return self._members.total_samples

    @property
    def seed(self) -> int:
        """Seed of the generator, that of the checkpoint after `load_checkpoint`."""
        return self._state.seed

    @property
    def trajectory_format(self) -> str:
        """Format of the files, that of the checkpoint after `load_checkpoint`."""
        return self._state.format_name

    @property
    def auto_save_path(self) -> Path | None:
        """Where trajectories are saved; None without `auto_save`."""
        return self._shelf.options.directory if self._shelf.options.auto_save else None

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of the trajectories, ascending."""
        with self._shelf.lock:
            return [entry.id for entry in self._members.entries]

    def add_trajectories(self, trajectories: Sequence[Trajectory]) -> Future[list[int]] | None:
        """Add rollouts. They are copied: callers may reuse their tensors.

        Args:
            trajectories: A list of `Trajectory`; plain dicts and dataclasses with such fields are taken, too.

        Returns:
            With `auto_save` a future of the new ids, done when all are saved: then they survive `kill -9`. Else None.

        Raises:
            SchemaError: A rollout has neither `prev_logprobs` nor `rewards`, or fields of other lengths. None is added.
            KindError: A value can be neither saved nor sampled. None is added.
            OptionError: A weights id may not stand in a file name, or `extra` has a field of `Trajectory`. None is
                added.
            UsageError: The process is a fork of the one that made the buffer.
            CheckpointError: An earlier trajectory could not be saved (it is tried again). None is added.
        """
        if isinstance(trajectories, (dict, Trajectory)) or not hasattr(trajectories, "__iter__"):
            msg = f"add_trajectories takes a list of Trajectory, got {type(trajectories).__name__}: wrap it in a list"
            raise KindError(msg)
        self._shelf.prepare()
        made = [
            _owned(value, self._state.format_name, f"trajectory {number}") for number, value in enumerate(trajectories)
        ]
        with self._shelf.lock:
            if self._state.counter + len(made) > MAX_ID + 1:
                msg = f"the ids are used up: the next one is {self._state.counter}, the highest {MAX_ID}"
                raise CheckpointError(msg)
            entries = [self._entry(*parts) for parts in made]
            promise = Promise([entry.id for entry in entries])
            self._shelf.admit(entries, promise)  # queued at once: an interrupt while it waits for room loses nothing
            self._members.append(entries)
        self._shelf.wait_for_room()
        return promise.future if self._shelf.options.auto_save else None

    def _entry(self, facts: Facts, held: Held, form: Any) -> Entry:
        facts = facts._replace(trajectory_id=self._state.counter)
        self._state.counter += 1
        return Entry(facts, form, held=held)

    def sample(
        self, num_chunks: SupportsIndex, *, replace: bool = True, missing: Literal["raise", "drop"] = "raise"
    ) -> dict[str, Any]:
        """Draw transitions uniformly from the window.

        Args:
            num_chunks: How many, 1 or more; exactly so many come back.
            replace: Draw each independently (so more than there are is no error); False draws each at most once.
            missing: What to do where some trajectories of the window lack a field: `raise` names it, `drop` leaves it
                out.

        Returns:
            A dict with the keys and the nesting of the rollout, new tensors `[num_chunks, ...]` on the CPU.

        Raises:
            EmptyBufferError: There is no trajectory.
            OptionError: `num_chunks` is no positive number, or larger than the window with `replace=False`.
            KeyMissingError: Some trajectories lack a field (see `missing`).
            SchemaError: A field differs in dtype or shape of a row between trajectories of the window.
            DamagedFileError: A file is gone or too short; the message names it.
            CheckpointError: A trajectory could not be saved in the background (it is tried again).
        """
        require_eager("sampling")
        count = _count_of("num_chunks", num_chunks)
        if missing not in {"raise", "drop"}:
            msg = f"missing must be 'raise' or 'drop', got {missing!r}"
            raise OptionError(msg)
        self._shelf.check()
        while True:
            members, fields, picked = self._draw(count, replace=replace, drop=missing == "drop")
            try:
                return gather(picked, fields, self._shelf.sources)
            except DamagedFileError:
                if self._members is members:
                    raise
                # Another thread has cleared or loaded meanwhile, and the spilled files are gone: draw among the new.

    def _draw(self, count: int, *, replace: bool, drop: bool) -> tuple[Members, Signature, Picked]:
        with self._shelf.lock:
            members = self._members
            if not len(members):
                msg = "the buffer is empty: add trajectories or load a checkpoint before sampling"
                raise EmptyBufferError(msg)
            below = members.window_samples
            if not replace and count > below:
                msg = f"num_chunks must be in [1, {below}] (the window) with replace=False, got {count}"
                raise OptionError(msg)
            fields = common_fields(members.layouts, drop=drop)
            return members, fields, members.pick(numbers(self._state.generator, count, below, replace=replace))

    def sample_chunks(
        self, num_chunks: SupportsIndex, *, replace: bool = True, missing: Literal["raise", "drop"] = "raise"
    ) -> dict[str, Any]:
        """Do what `sample` does, under the name that RLinf has for it."""
        return self.sample(num_chunks, replace=replace, missing=missing)

    def load_trajectory(self, trajectory_id: int) -> Trajectory:
        """Return a whole trajectory as it was added, in new tensors, lists and dicts.

        Raises:
            SlotError: There is none of this id.
            DamagedFileError: Its file is gone or damaged.
        """
        with self._shelf.lock:
            entry = self._members.find(trajectory_id)
        if entry is None:
            msg = f"no trajectory {trajectory_id!r}: the ids are {self.trajectory_ids[:20]}"
            raise SlotError(msg)
        return Trajectory.from_dict(copy.deepcopy(self._shelf.read_checked(entry).tree))

    def is_ready(self, min_size: int) -> bool:
        """Tell whether there are at least `min_size` trajectories."""
        return len(self) >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Do what `is_ready` does, for callers that await it."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, Any]:
        """Return counts: trajectories, transitions, cache, waiting saves, open files."""
        with self._shelf.lock:
            return {
                "num_trajectories": len(self._members),
                "total_samples": self._members.total_samples,
                "window_samples": self._members.window_samples,
                "trajectory_counter": self._state.counter,
                "sample_window_size": self._window,
                "trajectory_format": self._state.format_name,
                **self._shelf.stats(),
            }

    def flush(self) -> None:
        """Wait until every trajectory handed to the saver is on disk.

        Raises:
            CheckpointError: One could not be saved; it stays in memory and is tried again.
        """
        self._shelf.flush()

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Save all trajectories, counters and the generator into a new directory, which appears whole.

        Files are linked where the file system can, else copied. With the buffer's own `auto_save_path` nothing is
        copied: the journal is folded into the index there.

        Args:
            path: A directory that does not exist yet, or is empty.

        Raises:
            CheckpointError: The path is taken, or a trajectory could not be saved before.
            StorageMemoryError: The disk is full; nothing is left at `path`.
        """
        target = Path(path).absolute()
        self._shelf.check()
        if self.auto_save_path is not None and target == self.auto_save_path:
            self._fold_own(target)
            return
        with self._shelf.lock:
            kept = [checkpoint.Kept(entry, entry.held, entry.place) for entry in self._members.entries]
            head = self._state.head()
        checkpoint.save(target, head, kept)

    def _fold_own(self, target: Path) -> None:
        self._shelf.prepare()
        self._shelf.flush()
        if not self._shelf.fold_if_same(lambda: self._members.entries):
            msg = (
                f"{target} is where this buffer saves to, and it does not list the same trajectories (others were "
                "loaded from elsewhere, or lay there before): save the checkpoint to another path"
            )
            raise CheckpointError(msg)

    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: bool = False,  # noqa: FBT001, FBT002
        local_rank: int = 0,
        world_size: int = 1,
        *,
        on_damage: Literal["raise", "skip"] = "raise",
    ) -> None:
        """Replace the content with that of a directory that `save_checkpoint`, auto-saving or RLinf wrote.

        Sampling goes on where it was saved, draw for draw; with directories of RLinf it begins with their seed. Files
        are looked at, not read; their rows are read as they are drawn.

        Args:
            load_path: The directory.
            is_distributed: Take only this rank's contiguous share; shares differ by at most one trajectory, and each
                rank of several draws with a generator of its own.
            local_rank: This rank, in `[0, world_size)`.
            world_size: Number of ranks.
            on_damage: `raise` at the first missing or damaged file, or `skip` such files with a warning.

        Raises:
            CheckpointNotFoundError: No trajectories are there.
            CheckpointError: They are pickles and `allow_pickle` was not given.
            DamagedFileError: naming the file and the id. The buffer is as it was.
        """
        if on_damage not in {"raise", "skip"}:
            msg = f"on_damage must be 'raise' or 'skip', got {on_damage!r}"
            raise OptionError(msg)
        rank, ranks = _rank(is_distributed, local_rank, world_size)
        self._shelf.flush()
        path = Path(load_path).absolute()
        consent = self._shelf.options.allow_pickle
        loaded = checkpoint.load(path, allow_pickle=consent, rank=rank, ranks=ranks, on_damage=on_damage)
        own = self.auto_save_path
        if own is not None:
            _check_same_format(own, loaded.head.trajectory_format)
        generator = generator_in(loaded.head, rank, ranks, path)
        with self._shelf.lock:
            before, self._members, state = self._members.entries, Members(self._window), self._state
            self._members.append(loaded.entries)
            state.generator, state.seed, state.format_name = generator, loaded.head.seed, loaded.head.trajectory_format
            state.counter = max(state.counter, loaded.head.counter, self._shelf.lowest_free_id())
            self._shelf.empty_cache()
        self._shelf.forget(before, unlist=False)

    def clear(self) -> None:
        """Forget all trajectories. Files stay where they are; no id is given twice.

        With `auto_save` they are taken off the list of the directory. What waits to be saved is not saved any more:
        its future is cancelled.

        Raises:
            CheckpointError: Another buffer saves to the directory now.
            UsageError: The process is a fork of the one that made the buffer, or this is a callback of a future.
        """
        self._shelf.check_caller("clear")
        with self._shelf.lock:
            entries = self._members.entries
            self._members = Members(self._window)
            self._shelf.empty_cache()
        self._shelf.forget(entries, unlist=True)

    def clear_cache(self) -> None:
        """Let the memory of the cache go and end the saver's thread; the next add starts it again.

        Trajectories that are in memory alone are spilled before.

        Raises:
            CheckpointError: A trajectory could not be saved; it stays in memory.
        """
        self._shelf.clear_cache()

    def close(self) -> None:
        """Save what waits, fold the journal into the index and end the saver's thread.

        Then the directory loads in RLinf, too. The buffer can still be sampled, and an add opens the directory again.

        Raises:
            CheckpointError: A trajectory could not be saved; it stays in memory, and `flush` tries once more.
        """
        self._shelf.close()


def _owned(value: object, format_name: str, where: str) -> tuple[Facts, Held, Any]:
    tree = owned_tree(as_trajectory(value), where)
    check_tree(tree, format_name, where)
    fields = [
        Field(path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for path, leaf in flatten(tree, where=where).items()
        if hasattr(leaf, "untyped_storage")
    ]
    form = make_form(fields, where)
    facts = Facts(0, form.num_samples, tree["max_episode_length"], form.shape, tree["model_weights_id"])
    return facts, Held(tree, form), form


def _count_of(name: str, value: SupportsIndex) -> int:
    """Return a count, numpy's integers among them, as an int."""
    count = index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else 0
    if not 1 <= count <= _MOST_CHUNKS:
        msg = f"{name} must be a number of 1 or more (at most {_MOST_CHUNKS}), got {value!r:.80}"
        raise OptionError(msg)
    return count


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            hint = " (enable_cache=False keeps none)" if name == "cache_size" else ""
            msg = f"{name} must be 1 or more{hint}, got {count!r}"
            raise OptionError(msg)


def _rank(is_distributed: bool, local_rank: int, world_size: int) -> tuple[int, int]:  # noqa: FBT001
    if not is_distributed:
        if (local_rank, world_size) != (0, 1):
            msg = f"local_rank={local_rank} and world_size={world_size} need is_distributed=True"
            raise OptionError(msg)
        return 0, 1
    if type(local_rank) is not int or type(world_size) is not int or world_size < 1 or not 0 <= local_rank < world_size:
        msg = f"local_rank must be in [0, world_size), both integers, got {local_rank!r} of {world_size!r}"
        raise OptionError(msg)
    return local_rank, world_size


def _directory(path: str | os.PathLike[str] | None, format_name: str, *, auto_save: bool) -> Path | None:
    if path is not None and os.fspath(path):
        directory = Path(path).absolute()
        if directory.exists() and not directory.is_dir():
            msg = f"auto_save_path must be a directory, or a path where one can be made, got {directory}: it is a file"
            raise OptionError(msg)
        if auto_save:
            try:
                _check_same_format(directory, format_name)
            except CheckpointError as error:
                raise OptionError(str(error)) from error
        return directory
    if not auto_save:
        return None
    directory = Path("logs", "replay_buffer", f"{time.strftime('%Y%m%d-%H%M%S')}-{new_token()[:6]}").absolute()
    warnings.warn(f"auto_save_path was not given: trajectories are saved to {directory}", UserWarning, stacklevel=3)
    return directory


def _check_same_format(directory: Path, format_name: str) -> None:
    if not has_listing(directory):
        return
    found = read_listing(directory, strict=False).head.trajectory_format
    if found != format_name:
        msg = (
            f"auto_save_path {directory} holds trajectories as {found}, not {format_name}: choose another path, give "
            f"trajectory_format={found!r}, or convert it (ostinato convert)"
        )
        raise CheckpointError(msg)
