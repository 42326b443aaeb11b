"""`TrajectoryReplayBuffer`: batched rollouts on disk, and uniform sampling of their transitions."""

from __future__ import annotations

import copy
import os
import time
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, final

from ostinato.core.kinds import require_eager
from ostinato.core.options import check_choice, check_integer
from ostinato.durable.files import new_token
from ostinato.durable.progress import TRAJECTORIES, Progress, bar_only, finish
from ostinato.durable.tensorfile import check_format, check_tree
from ostinato.errors import CheckpointError, DamagedFileError, EmptyBufferError, KindError, OptionError, SlotError
from ostinato.trajectories import checkpoint
from ostinato.trajectories.checkpoint import BufferState
from ostinato.trajectories.index import MAX_ID, Entry, has_index, is_seed, read_index
from ostinato.trajectories.saver import SaveGroup
from ostinato.trajectories.store import Store, StoreOptions
from ostinato.trajectories.trajectory import Trajectory, as_trajectory, owned_tree
from ostinato.trajectories.trajectory_list import TrajectoryList

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from ostinato.durable.progress import ProgressOption
    from ostinato.trajectories.layout import Signature
    from ostinato.trajectories.trajectory_list import DrawnTransitions

__all__ = ["TrajectoryReplayBuffer"]

_MAX_CHUNKS = 2**31


@final
class TrajectoryReplayBuffer:
    """Stores batched rollouts on disk and samples single transitions from them.

    Memory holds an index, a bounded cache and a bounded queue, not the data. Sampling reads only the rows that were
    drawn, at their positions in the files. Thread-safe.

    Examples:
        >>> import torch
        >>> from ostinato import Trajectory, TrajectoryReplayBuffer
        >>> rollout = Trajectory(rewards=torch.rand(5, 2, 1), curr_obs={"states": torch.rand(5, 2, 8)})
        >>> with TrajectoryReplayBuffer(auto_save=True, auto_save_path="rollouts") as buffer:
        ...     ids = buffer.add_trajectories([rollout]).result()  # saved, even if the process is killed now
        ...     batch = buffer.sample(num_chunks=4)
        >>> ids, batch["curr_obs"]["states"].shape
        ([0], torch.Size([4, 8]))
    """

    def __init__(
        self,
        seed: int = 1234,
        enable_cache: bool = True,  # noqa: FBT001, FBT002 - positional as in RLinf
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
        progress: ProgressOption = None,
    ) -> None:
        """Make an empty buffer. Nothing is written before the first trajectory is added.

        Args:
            seed: Seed of the buffer's own generator.
            enable_cache: Keep recent trajectories in memory.
            cache_size: Number of trajectories in the cache, 1 or more.
            sample_window_size: Sample from this many of the most recent trajectories; 0 means all.
            auto_save: Save each trajectory durably in the background. Otherwise those that leave the cache are written
                to a temporary directory, which is removed with the buffer; `save_checkpoint` keeps them.
            auto_save_path: Directory to save to; with `auto_save=False` where the temporary directory is made. None or
                "": a new directory `logs/replay_buffer/...` in the working directory, which a warning names; with
                `auto_save=False` the system's temporary directory.
            trajectory_format: `pt`, `pkl` or `safetensors` (the fastest to sample from).
            allow_pickle: Allow reading and writing `pkl`. Reading such a file executes the code in it.
            cache_bytes: Most bytes in the cache; None for no bound.
            save_queue_size: Trajectories that may wait to be saved; `add_trajectories` blocks when more do.
            max_open_files: Files kept open for sampling; at most half of those that the process may open.
            progress: With `auto_save`, the trajectories whose records in `auto_save_path` were read; see
                `ProgressOption`. False also shows no bar when the first `add_trajectories` opens the directory, which
                reads and may repair its index, and when `close` writes it.

        Raises:
            OptionError: An argument is out of range, `pkl` is given without `allow_pickle`, or `auto_save_path` holds
                trajectories of another format or a damaged index.
        """
        check_format(trajectory_format, allow_pickle=allow_pickle)
        cache_size = check_integer("cache_size", cache_size, 1, OptionError)
        self._window = check_integer("sample_window_size", sample_window_size, 0, OptionError)
        if cache_bytes is not None:
            cache_bytes = check_integer("cache_bytes", cache_bytes, 0, OptionError)
            if not enable_cache:
                msg = f"cache_bytes={cache_bytes} needs enable_cache=True: there is no cache"
                raise OptionError(msg)
        if not is_seed(seed):
            msg = f"seed must be an integer of 64 bits, got {seed!r}"
            raise OptionError(msg)
        with Progress(progress, "open", 0, unit=TRAJECTORIES):
            directory = _directory(auto_save_path, trajectory_format, auto_save=auto_save)
        self._state = BufferState(seed, trajectory_format)
        options = StoreOptions(
            directory,
            auto_save,
            cache_size=cache_size if enable_cache else 0,
            cache_bytes=cache_bytes,
            queue_size=check_integer("save_queue_size", save_queue_size, 1, OptionError),
            open_files=check_integer("max_open_files", max_open_files, 1, OptionError),
            allow_pickle=allow_pickle,
            bar=bar_only(progress),
        )
        self._store = Store(options, self._state)
        self._trajectories = TrajectoryList(self._window)
        self._finalizer = weakref.finalize(self, self._store.end)

    def __len__(self) -> int:
        """Number of trajectories."""
        return len(self._trajectories)

    def __repr__(self) -> str:
        """Number of trajectories and transitions, and the format."""
        counts = f"{len(self)} trajectories, {self.total_samples} transitions"
        return f"TrajectoryReplayBuffer({counts}, {self._state.format_name})"

    def __enter__(self) -> Self:
        """Return the buffer; the end of the block calls `close`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the buffer."""
        self.close()

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self._trajectories)

    @property
    def total_samples(self) -> int:
        """Number of transitions, the sum of T * B."""
        return self._trajectories.total_samples

    @property
    def seed(self) -> int:
        """Seed of the generator; after `load_checkpoint` the seed of the checkpoint."""
        return self._state.seed

    @property
    def trajectory_format(self) -> str:
        """Format of the files; after `load_checkpoint` the format of the checkpoint."""
        return self._state.format_name

    @property
    def auto_save_path(self) -> Path | None:
        """Where trajectories are saved; None without `auto_save`."""
        return self._store.options.save_directory

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of the trajectories, ascending."""
        with self._store.lock:
            return [entry.id for entry in self._trajectories.entries]

    def add_trajectories(self, trajectories: Sequence[Trajectory]) -> Future[list[int]] | None:
        """Add rollouts. Their tensors are copied, so the caller may reuse them.

        After an error no rollout is added.

        Args:
            trajectories: A list of `Trajectory`, or of plain dicts or dataclasses with the same fields.

        Returns:
            With `auto_save` a future of the new ids, done when all are saved and survive a crash. Otherwise None.

        Raises:
            SchemaError: A rollout has neither `prev_logprobs` nor `rewards`, or fields of different lengths.
            KindError: A value has a type that cannot be saved.
            OptionError: A weights id is not valid in a file name, or `extra` has a field of `Trajectory`.
            UsageError: The process is a fork of the one that made the buffer.
            CheckpointError: An earlier trajectory could not be saved; it is tried again.
        """
        if isinstance(trajectories, (dict, Trajectory)) or not hasattr(trajectories, "__iter__"):
            msg = f"add_trajectories takes a list of Trajectory, got {type(trajectories).__name__}: wrap it in a list"
            raise KindError(msg)
        self._store.prepare()
        entries = [
            _new_entry(value, self._state.format_name, f"trajectory {number}")
            for number, value in enumerate(trajectories)
        ]
        with self._store.lock:
            first = self._state.counter
            if first + len(entries) > MAX_ID + 1:
                msg = f"the ids are used up: the next one is {first}, the highest {MAX_ID}"
                raise CheckpointError(msg)
            for number, entry in enumerate(entries, first):
                entry.info = entry.info._replace(trajectory_id=number)
            self._state.counter += len(entries)
            group = SaveGroup([entry.id for entry in entries])
            self._trajectories.append(entries)
            # Last, and before waiting for room: an interrupt once the saver is awake must find them in the list.
            self._store.admit(entries, group)
        self._store.wait_for_room()
        return group.future if self._store.options.auto_save else None

    def sample(
        self, num_chunks: SupportsIndex, *, replace: bool = True, missing: Literal["raise", "drop"] = "raise"
    ) -> dict[str, Any]:
        """Draw transitions uniformly from the window.

        Args:
            num_chunks: Number of transitions, 1 or more.
            replace: Draw each independently, so that `num_chunks` may exceed the window; False draws each at most once.
            missing: What to do if some trajectories of the window lack a field: `raise`, or `drop` the field.

        Returns:
            A dict with the keys and nesting of the rollouts; new tensors `[num_chunks, ...]` on the CPU.

        Raises:
            EmptyBufferError: The buffer is empty.
            OptionError: `num_chunks` is not positive, or larger than the window with `replace=False`.
            KeyMissingError: Some trajectories lack a field (see `missing`).
            SchemaError: A field differs in dtype or row shape between trajectories of the window.
            DamagedFileError: A file is missing or too short; the message names it.
            CheckpointError: A trajectory could not be saved in the background; it is tried again.
        """
        require_eager("sampling")
        count = check_integer("num_chunks", num_chunks, 1, OptionError, below=_MAX_CHUNKS)
        check_choice("missing", missing, ("raise", "drop"))
        self._store.check()
        while True:
            trajectories, fields, drawn = self._draw(count, replace=replace, drop=missing == "drop")
            try:
                return self._store.rows.read(drawn, fields)
            except DamagedFileError:
                if self._trajectories is trajectories:
                    raise
                # Another thread has cleared or loaded meanwhile, which removed spilled files: draw again.

    def _draw(self, count: int, *, replace: bool, drop: bool) -> tuple[TrajectoryList, Signature, DrawnTransitions]:
        with self._store.lock:
            trajectories = self._trajectories
            if not len(trajectories):
                msg = "the buffer is empty: add trajectories or load a checkpoint before sampling"
                raise EmptyBufferError(msg)
            below = trajectories.window_samples
            if not replace and count > below:
                msg = f"num_chunks must be in [1, {below}] (the window) with replace=False, got {count}"
                raise OptionError(msg)
            fields = trajectories.common_fields(drop=drop)
            return trajectories, fields, trajectories.draw(self._state.generator, count, replace=replace)

    def sample_chunks(
        self, num_chunks: SupportsIndex, *, replace: bool = True, missing: Literal["raise", "drop"] = "raise"
    ) -> dict[str, Any]:
        """Call `sample`; the name is RLinf's."""
        return self.sample(num_chunks, replace=replace, missing=missing)

    def load_trajectory(self, trajectory_id: int) -> Trajectory:
        """Return a copy of a whole trajectory.

        Raises:
            SlotError: No trajectory has this id.
            DamagedFileError: Its file is missing or damaged.
        """
        with self._store.lock:
            entry = self._trajectories.find(trajectory_id)
        if entry is None:
            msg = f"no trajectory has the id {trajectory_id!r}: the ids are {self.trajectory_ids[:20]}"
            raise SlotError(msg)
        return Trajectory.from_dict(copy.deepcopy(self._store.read_checked(entry).tree))

    def is_ready(self, min_size: int) -> bool:
        """Return whether the buffer holds at least `min_size` trajectories."""
        return len(self) >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Call `is_ready`, for callers that await it."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, Any]:
        """Return counts of trajectories, transitions, cached trajectories, pending saves and open files."""
        with self._store.lock:
            return {
                "num_trajectories": len(self._trajectories),
                "total_samples": self._trajectories.total_samples,
                "window_samples": self._trajectories.window_samples,
                "trajectory_counter": self._state.counter,
                "sample_window_size": self._window,
                "trajectory_format": self._state.format_name,
                **self._store.stats(),
            }

    def flush(self) -> None:
        """Wait until every trajectory queued so far is saved.

        Raises:
            CheckpointError: A trajectory could not be saved; it stays in memory and is tried again.
        """
        self._store.flush()

    def save_checkpoint(self, path: str | os.PathLike[str], *, progress: ProgressOption = None) -> None:
        """Save all trajectories, the id counter and the generator to a new directory, completely or not at all.

        Files are linked, or copied if the file system cannot link. If `path` is the buffer's own `auto_save_path`,
        nothing is copied and only the index there is written.

        Args:
            path: A directory that does not exist yet, or is empty.
            progress: The trajectories done and their total; see `ProgressOption`.

        Raises:
            CheckpointError: The path exists and is not empty, or an earlier trajectory could not be saved.
            StorageMemoryError: The disk is full; nothing is left at `path`.
        """
        target = Path(path).absolute()
        with Progress(progress, "save", unit=TRAJECTORIES) as bar:
            self._store.check()
            if self.auto_save_path is not None and target == self.auto_save_path:
                bar.begin(len(self))
                self._save_in_place(target)
                return
            with self._store.lock:
                entries, head = [copy.copy(entry) for entry in self._trajectories.entries], self._state.head()
            checkpoint.save(target, head, entries)

    def _save_in_place(self, target: Path) -> None:
        self._store.prepare()
        self._store.flush()
        finish(TRAJECTORIES)
        if not self._store.rewrite_index_if_same(lambda: self._trajectories.entries):
            msg = (
                f"{target} is the auto_save_path of this buffer, but does not list the same trajectories (some were "
                "loaded from elsewhere, or were there before): save the checkpoint to another path"
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
        progress: ProgressOption = None,
    ) -> None:
        """Replace the content with that of a directory written by `save_checkpoint`, `auto_save` or RLinf.

        The generator continues where it was saved, so sampling repeats bit for bit; for directories of RLinf it begins
        with their seed. Sizes or headers of the files are checked; rows are read when they are drawn.
        After an error the buffer is unchanged.

        Args:
            load_path: The directory.
            is_distributed: Load only this rank's contiguous share. Shares differ by at most one trajectory, and each
                rank gets its own generator.
            local_rank: This rank, in `[0, world_size)`.
            world_size: Number of ranks.
            on_damage: `raise` for the first missing or damaged file, or `skip` such files with a warning.
            progress: The trajectories checked and their total; see `ProgressOption`.

        Raises:
            CheckpointNotFoundError: The directory holds no trajectories.
            CheckpointError: The files are pickles and `allow_pickle` is False.
            DamagedFileError: A file is missing or damaged; the message names it and the id.
        """
        check_choice("on_damage", on_damage, ("raise", "skip"))
        rank, ranks = _rank(is_distributed, local_rank, world_size)
        path = Path(load_path).absolute()
        allow_pickle = self._store.options.allow_pickle
        with Progress(progress, "load", unit=TRAJECTORIES):
            self._store.flush()
            state, entries = checkpoint.load(
                path, allow_pickle=allow_pickle, rank=rank, ranks=ranks, on_damage=on_damage
            )
        own = self.auto_save_path
        if own is not None:
            _check_same_format(own, state.format_name)
        with self._store.lock:
            before, self._trajectories = self._trajectories.entries, TrajectoryList(self._window)
            self._trajectories.append(entries)
            self._state.restore(state, self._store.lowest_free_id())
            self._store.empty_cache()
        self._store.forget(before, unlist=False)

    def clear(self) -> None:
        """Remove all trajectories from the buffer. Saved files stay; ids are not reused.

        With `auto_save` the trajectories are removed from the index of the directory. Trajectories that wait to be
        saved are discarded and their futures cancelled.

        Raises:
            CheckpointError: Another buffer saves to the directory now.
            UsageError: The process is a fork of the one that made the buffer, or this is a callback of a future.
        """
        self._store.check_caller("clear")
        with self._store.lock:
            entries = self._trajectories.entries
            self._trajectories = TrajectoryList(self._window)
            self._store.empty_cache()
        self._store.forget(entries, unlist=True)

    def clear_cache(self) -> None:
        """Empty the cache and end the background thread; the next `add_trajectories` starts it again.

        Trajectories that are only in memory are written to disk first.

        Raises:
            CheckpointError: A trajectory could not be saved; it stays in memory.
        """
        self._store.clear_cache()

    def close(self) -> None:
        """Save what is queued, write the index and end the background thread.

        Afterwards RLinf can load the directory, too. The buffer can still be sampled, and `add_trajectories` opens the
        directory again.

        Raises:
            CheckpointError: A trajectory could not be saved; it stays in memory, and `flush` tries again.
        """
        with Progress(self._store.options.bar, "close", unit=TRAJECTORIES):
            self._store.close()


def _new_entry(value: object, format_name: str, where: str) -> Entry:
    """Copy a rollout and check that it can be saved. The id is set later."""
    tree = owned_tree(as_trajectory(value), where)
    check_tree(tree, format_name, where)
    return Entry.of_tree(tree, where)


def _rank(is_distributed: bool, local_rank: int, world_size: int) -> tuple[int, int]:  # noqa: FBT001
    if not is_distributed:
        if (local_rank, world_size) != (0, 1):
            msg = f"local_rank={local_rank} and world_size={world_size} need is_distributed=True"
            raise OptionError(msg)
        return 0, 1
    check_integer("world_size", world_size, 1, OptionError)
    if check_integer("local_rank", local_rank, 0, OptionError) >= world_size:
        msg = f"local_rank must be in [0, {world_size}), below world_size, got {local_rank}"
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
    if has_index(directory):
        read_index(directory, strict=False).check_format(format_name)
