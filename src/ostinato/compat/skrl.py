"""The memory of skrl, on top of Ostinato: `RandomMemory`. `docs/compat/skrl.md` lists the differences.

skrl is not imported: its agents take any object with the methods of its memories.
"""

from __future__ import annotations

import csv
import io
import math
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np
import torch

from ostinato import buffers
from ostinato._optional import require
from ostinato.buffers.options import positive
from ostinato.core.episodes.tracker import Episodes
from ostinato.core.options import check_choice
from ostinato.core.records import Draw
from ostinato.durable.files import atomic_write
from ostinato.errors import CheckpointNotFoundError, KeyMissingError, OptionError, SchemaError, UsageError
from ostinato.samplers import RandomSampler, Sampler
from ostinato.samplers.uniform import draw_distinct
from ostinato.storages import TensorStorage
from ostinato.units import NStep, SampleUnit, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from gymnasium.spaces import Space
    from torch import Tensor

    from ostinato.core.records import View

__all__ = ["RandomMemory"]

_EPISODE = "ostinato.episode"
_EPISODES = Episodes(traj_key=_EPISODE)
_STATE = "ostinato.steps"
_FORMATS = ("pt", "npz", "csv")
_ENDS = ("terminated", "truncated")
_AFTER = ("next_observations", "next_states", *_ENDS)
"""Tensors that an n-step transition takes from its last step."""
_AROUND = ("observations", "next_observations")


class RandomMemory:
    """A ring of `memory_size` steps of `num_envs` environments, with random samples of rows or of sequences of rows.

    The index of a row is `step * num_envs + environment`, as in skrl. No sequence continues over the end of the ring;
    by default none contains rows of two episodes. An episode ends at a row with `terminated` or `truncated`; without a
    tensor `truncated` also where the observation of a row is not the next observation of the row before. Samples are
    drawn with the global generator of the device. Thread-safe for one writer.

    Args:
        memory_size: Capacity in steps.
        num_envs: Number of parallel environments.
        device: Device of tensors and samples; None: CUDA if it is available, else the CPU.
        export: Write a file with `save` whenever the last slot has been written, before old rows are replaced.
        export_format: Format of these files: "pt", "npz" or "csv".
        export_directory: Directory of these files; agents of skrl set it to that of the experiment if it is empty.
        replacement: Draw with replacement. Otherwise, the rows (or first rows of sequences) of a batch are different
            ones, and the batch is smaller where there are fewer.
        n_steps: Maximum number of steps of a transition. More than one requires `discount_factor`. Rewards are the
            discounted sums, the next observations and states and the end flags are those of the last step.
        discount_factor: Discount factor of one step. The tensor `discounts` of a sample is `discount_factor ** k` for a
            transition over `k` steps, by which a target multiplies the value of the next observation.
        cross_episodes: Let sequences continue in the next episode of their environment, as in skrl.
        sampler: A callable that returns the sampler, such as `partial(PrioritizedSampler, 9_000, alpha=0.6, beta=0.4)`;
            `replacement` is then of no effect. The tensor `priority_weight` of a sample holds the importance weights.

    Raises:
        KindError: A number is not an integer.
        OptionError: A number is out of range, the format is unknown, or options exclude each other.

    Examples:
        >>> import torch
        >>> from ostinato.compat.skrl import RandomMemory
        >>> memory = RandomMemory(memory_size=100, num_envs=2, device="cpu")
        >>> memory.create_tensor("observations", size=3), memory.create_tensor("rewards", size=1)
        (True, True)
        >>> memory.add_samples(observations=torch.zeros(2, 3), rewards=torch.ones(2, 1))
        >>> observations, rewards = memory.sample(["observations", "rewards"], batch_size=2)[0]
        >>> observations.shape, rewards.shape, len(memory)
        (torch.Size([2, 3]), torch.Size([2, 1]), 2)
    """

    def __init__(
        self,
        *,
        memory_size: int,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        export: bool = False,
        export_format: Literal["pt", "npz", "csv"] = "pt",
        export_directory: str = "",
        replacement: bool = False,
        n_steps: int = 1,
        discount_factor: float | None = None,
        cross_episodes: bool = False,
        sampler: Callable[[], Sampler] | None = None,
    ) -> None:
        self.memory_size = positive("memory_size", memory_size)
        self.num_envs = positive("num_envs", num_envs)
        self.device = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.export = export
        self.export_format = check_choice("export_format", export_format, _FORMATS)
        self.export_directory = export_directory
        self.tensors: dict[str, Tensor] = {}
        """Stored tensors by name, `[memory_size, num_envs, *size]`: the memory of the rows, not copies."""
        self.sampling_indexes: Tensor | None = None
        if positive("n_steps", n_steps) > 1 and (discount_factor is None or cross_episodes):
            msg = f"n_steps={n_steps} needs a discount_factor, and cross_episodes=False: returns end with their episode"
            raise OptionError(msg)
        self._n_step = None if discount_factor is None else (n_steps, discount_factor)
        self._cross_episodes = cross_episodes
        self._make_sampler = sampler or (RandomSampler if replacement else _DistinctRows)
        self._readers: dict[int, buffers.ReplayBuffer] = {}
        self._drawn: tuple[buffers.ReplayBuffer, dict[str, Any]] | None = None
        self._tracked = self._n_step is not None
        self._episode_of = torch.zeros(self.memory_size * self.num_envs, dtype=torch.int64, device=self.device)
        self._begin()

    def _begin(self) -> None:
        """Reset what follows the episodes of the environments."""
        envs, where = self.num_envs, self.device
        self._last = torch.arange(envs, device=where).unsqueeze(0)
        self._over = torch.zeros((1, envs), dtype=torch.bool, device=where)
        self._after: Tensor | None = None

    # -- tensors ----------------------------------------------------------------------------------------------

    def create_tensor(
        self,
        name: str,
        *,
        size: int | list[int] | tuple[int, ...] | Space[Any] | None,
        dtype: torch.dtype | None = None,
        keep_dimensions: bool = False,
    ) -> bool:
        """Create a tensor, `[memory_size, num_envs, size]`. Floats are NaN until they are written.

        Args:
            name: Name of the tensor.
            size: Numbers of a row, dimensions whose product it is, or a space; None creates no tensor.
            dtype: None: the default dtype of torch.
            keep_dimensions: Give the tensor the dimensions of `size`, `[memory_size, num_envs, *size]`.

        Returns:
            Whether it was created: False for a size of None, and if it exists.

        Raises:
            OptionError: It exists with another size or dtype, or there are dimensions to keep and `size` has none.
            UsageError: Rows were written before.
        """
        if size is None:
            return False
        if keep_dimensions and not isinstance(size, (tuple, list)):
            msg = f"keep_dimensions needs a size of several integers, got {size!r}"
            raise OptionError(msg)
        shape = (*size,) if keep_dimensions else (_count(size),)  # type: ignore[misc]  # checked above
        wanted = dtype or torch.get_default_dtype()
        known = self.tensors.get(name)
        if known is not None:
            if tuple(known.shape[2:]) != shape or (dtype is not None and known.dtype is not dtype):
                msg = (
                    f"tensor {name!r} exists with size {list(known.shape[2:])} and {known.dtype}, got {shape}, {dtype}"
                )
                raise OptionError(msg)
            return False
        if self._readers:
            msg = f"create tensor {name!r} before the first rows are written: a row has all tensors"
            raise UsageError(msg)
        self.tensors[name] = _blank((self.memory_size, self.num_envs, *shape), wanted, self.device)
        return True

    @property
    def tensors_view(self) -> dict[str, Tensor]:
        """The tensors by row, `[memory_size * num_envs, *size]`. Views."""
        return {name: tensor.flatten(0, 1) for name, tensor in self.tensors.items()}

    def get_tensor_names(self) -> list[str]:
        """Return the names of the tensors in alphabetical order."""
        return sorted(self.tensors)

    def get_tensor_by_name(self, name: str) -> Tensor:
        """Return a tensor, `[memory_size, num_envs, *size]`: the memory of the rows, not a copy.

        Raises:
            KeyMissingError: There is no such tensor.
        """
        if name not in self.tensors:
            msg = f"there is no tensor {name!r}, but {self.get_tensor_names()}: create_tensor() makes one"
            raise KeyMissingError(msg)
        return self.tensors[name]

    def set_tensor_by_name(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor, `[memory_size, num_envs, *size]`; episodes stay as they were recorded.

        Raises:
            KeyMissingError: There is no such tensor.
        """
        with torch.no_grad():
            self.get_tensor_by_name(name).copy_(tensor)

    def share_memory(self) -> None:
        """Move the tensors to shared memory, before rows are written.

        Raises:
            UsageError: Rows were written before.
        """
        if self._readers:
            msg = "share_memory() moves the tensors: call it before rows are written or sampled"
            raise UsageError(msg)
        for tensor in self.tensors.values():
            if not tensor.is_cuda:
                tensor.share_memory_()  # type: ignore[no-untyped-call]

    # -- writing ----------------------------------------------------------------------------------------------

    def add_samples(self, **tensors: Tensor | None) -> None:
        """Write rows: one step of all environments, of some of them, or several steps of a single environment.

        Rows of some environments are those of the environments that follow the last ones.

        Args:
            **tensors: `[rows, *size]`, or `[*size]` for one row. Tensors that were not created are ignored; those that
                are None or left out are NaN (0 for other dtypes) in these rows. Converted to the dtypes created.

        Raises:
            OptionError: No tensors are given, or more rows than there are environments, of which there are several.
            SchemaError: A tensor does not have the size that was created; nothing is changed.
        """
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if not given:
            msg = "add_samples() takes tensors by name, got none"
            raise OptionError(msg)
        first = given.get("observations", next(iter(given.values())))
        rows, room = (first.shape[0] if first.ndim > 1 else 1), self.num_envs - self.env_index
        if rows > room and self.num_envs > 1:
            msg = f"a step has {self.num_envs} environments, of which {room} are missing, got {rows} rows"
            raise OptionError(msg)
        self._write({name: self._rows_of(name, given.get(name), rows) for name in self.tensors}, rows)

    def _rows_of(self, name: str, value: Tensor | None, rows: int) -> Tensor:
        """Return rows of a tensor, `[rows, *size]`, on its device and in its dtype."""
        column = self.tensors[name]
        shape = (rows, *column.shape[2:])
        if value is None:
            return _blank(shape, column.dtype, column.device)
        if value.numel() != math.prod(shape):
            msg = f"tensor {name!r} must have the shape {list(shape)} (rows first), got {list(value.shape)}"
            raise SchemaError(msg)
        return value.detach().to(column).reshape(shape)

    def _write(self, fresh: dict[str, Tensor], rows: int) -> None:
        """Write rows; with `export` up to the end of the ring, and then the others."""
        while rows and self.export:
            part = min(rows, self.memory_size * self.num_envs - self.buffer.cursor)
            self._store({name: tensor[:part] for name, tensor in fresh.items()})
            if self.buffer.cursor == 0:
                self.save(self.export_directory, format=self.export_format)
            fresh, rows = {name: tensor[part:] for name, tensor in fresh.items()}, rows - part
        if rows:
            self._store(fresh)

    def _store(self, fresh: dict[str, Tensor]) -> None:
        rows = next(iter(fresh.values())).shape[0]
        if self._tracked:
            numbers = self._episodes(fresh, rows, self.env_index)
        else:
            numbers = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.buffer.extend({**fresh, _EPISODE: numbers})

    def _track(self) -> None:
        """Number the episodes of the rows present, and from now on those of new rows."""
        self._tracked, capacity, rows = True, self.memory_size * self.num_envs, len(self)
        first = self.buffer.cursor if self.filled else 0
        order = torch.arange(first, first + rows, device=self.device) % capacity
        head, tail = -first % self.num_envs, (first + rows) % self.num_envs
        for part in (order[:head], order[head : rows - tail], order[rows - tail :]):
            if part.numel():
                known = {name: self.tensors_view[name][part] for name in (*_AROUND, *_ENDS) if name in self.tensors}
                self._episode_of[part] = self._episodes(known, part.numel(), int(part[0]) % self.num_envs)

    def _episodes(self, fresh: dict[str, Tensor], rows: int, first: int) -> Tensor:
        """Return the number of the episode of each row, int64 `[rows]`; with `cross_episodes` its environment."""
        width = min(rows, self.num_envs - first)
        envs = slice(first, first + width)
        if self._cross_episodes:
            return self._last[:, envs].expand(rows // width, width).flatten()
        ends = torch.zeros((rows // width, width), dtype=torch.bool, device=self.device)
        for flags in (fresh[name] for name in _ENDS if name in fresh):
            ends |= flags.reshape(ends.shape).bool()
        begins = torch.cat((self._over[:, envs], ends[:-1]))
        self._over[:, envs] = ends[-1:]
        if "truncated" not in fresh and fresh.keys() >= {*_AROUND}:  # time limits are not among the flags
            now, after = (_row_bytes(fresh[name]).reshape(*ends.shape, -1) for name in _AROUND)
            if self._after is None:  # the first row of an environment begins an episode in any case
                self._after = torch.zeros((1, self.num_envs, now.shape[-1]), dtype=torch.uint8, device=self.device)
            before = torch.cat((self._after[:, envs], after[:-1]))
            begins, self._after[:, envs] = begins | (before != now).any(-1), after[-1:]
        numbers = self._last[:, envs] + begins.cumsum(0) * self.num_envs
        self._last[:, envs] = numbers[-1:]
        return numbers.flatten()

    def reset(self) -> None:
        """Remove all rows; the tensors keep their values until these are replaced."""
        self._begin()
        if self._readers:
            self.buffer.empty()

    # -- reading ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.buffer) if self._readers else 0

    @property
    def filled(self) -> bool:
        """Whether every slot has a row."""
        return len(self) == self.memory_size * self.num_envs

    @property
    def memory_index(self) -> int:
        """The step of the row that is written next."""
        return self.buffer.cursor // self.num_envs if self._readers else 0

    @property
    def env_index(self) -> int:
        """The environment of the row that is written next."""
        return self.buffer.cursor % self.num_envs if self._readers else 0

    @property
    def buffer(self) -> buffers.ReplayBuffer:
        """The buffer of Ostinato that holds the rows; it is made with the tensors created before."""
        if not self._readers:
            if not self.tensors:
                msg = "the memory has no tensors: call create_tensor() before rows are written or sampled"
                raise UsageError(msg)
            unit = self._units(1)
            made = buffers.ReplayBuffer(
                storage=TensorStorage({**self.tensors_view, _EPISODE: self._episode_of}),
                sampler=self._make_sampler(),
                sample_unit=unit or None,
                episodes=_EPISODES if unit else None,
            )
            made.empty()
            self._readers[1] = made
        return self._readers[1]

    def _units(self, length: int) -> list[SampleUnit]:
        """Return the units of samples with sequences of this length."""
        units: list[SampleUnit] = []
        if length > 1:
            units.append(Sequence(length, "strict"))
        if self._n_step is not None:
            moved = [name for name in _AFTER if name in self.tensors]
            units.append(NStep(*self._n_step, reward_key="rewards", next_keys=moved))
        return units

    def _reader(self, length: int) -> buffers.ReplayBuffer:
        """Return what samples sequences of this length: the buffer, or a view of it."""
        buffer = self.buffer
        if positive("sequence_length", length) not in self._readers:
            if not self._tracked:
                self._track()
            self._readers[length] = buffer.view(
                sampler=self._make_sampler(), sample_unit=self._units(length), episodes=_EPISODES
            )
        return self._readers[length]

    def sample(
        self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Tensor | None]]:
        """Sample rows, or sequences of rows of one environment.

        Args:
            names: Names of tensors, also `discounts` (with `discount_factor`) and `priority_weight` (of a prioritized
                sampler).
            batch_size: Number of rows or sequences.
            mini_batches: Number of parts that the sample is divided into.
            sequence_length: Rows of a sequence.

        Returns:
            For each part the tensors in the order of the names, `[batch_size * sequence_length, *size]`, the rows of a
            sequence after each other; None for a tensor that does not exist. Copies.

        Raises:
            EmptyBufferError: There are no rows, or no sequence of this length.
        """
        reader = self._reader(sequence_length)
        batch, info = reader.sample(batch_size, return_info=True)
        self._drawn = reader, info
        self.sampling_indexes = info["index"]
        more = {"discounts": batch.get("gamma"), "priority_weight": info.get("priority_weight")}
        found = {**batch, **{name: x.unsqueeze(-1) for name, x in more.items() if x is not None}}
        return _divided([found.get(name) for name in names], mini_batches)

    def sample_by_index(
        self, names: list[str], *, indexes: list[int] | np.ndarray[Any, Any] | Tensor, mini_batches: int = 1
    ) -> list[list[Tensor | None]]:
        """Return the rows at indexes, see `sample`; rows that were never written are NaN (or 0)."""
        views = self.tensors_view
        index = torch.as_tensor(indexes, dtype=torch.int64, device=self.device)
        return _divided([views[name][index] if name in views else None for name in names], mini_batches)

    def sample_all(
        self, names: list[str], *, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Tensor | None]]:
        """Return all rows: step by step, or with sequences one environment after the other, each from its oldest row.

        Parts without sequences have the same size; the last rows that do not fill one are left out, as in skrl.
        """
        if sequence_length == 1:
            kept = slice(0, len(self) - len(self) % positive("mini_batches", mini_batches))
            found = {name: tensor[kept] for name, tensor in self.tensors_view.items()}
            return _divided([found.get(name) for name in names], mini_batches)
        index = self._steps_present() * self.num_envs + torch.arange(self.num_envs, device=self.device).unsqueeze(1)
        return self.sample_by_index(names, indexes=index.flatten(), mini_batches=mini_batches)

    def _steps_present(self) -> Tensor:
        """Return the steps that have rows of all environments of one moment, the oldest first."""
        if not self.filled:
            return torch.arange(len(self) // self.num_envs, device=self.device)
        mixed = int(self.env_index > 0)
        steps = torch.arange(self.memory_index + mixed, self.memory_index + self.memory_size, device=self.device)
        return steps % self.memory_size

    def get_sampling_indexes(self) -> Tensor | None:
        """Return the indexes of the last sample, int64 `[batch_size * sequence_length]`; None before the first one."""
        return self.sampling_indexes

    def update_priority(self, priority: Tensor) -> None:
        """Set the priorities of the rows of the last sample, except rows replaced since; of sequences the largest.

        Args:
            priority: Finite non-negative numbers, one for each row, such as absolute TD errors.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; nothing is changed.
            UsageError: There is no sample.
        """
        if self._drawn is None:
            msg = "update_priority() is for the rows of the last sample: call sample() first"
            raise UsageError(msg)
        reader, info = self._drawn
        reader.update_priority(info, priority)

    # -- saving -----------------------------------------------------------------------------------------------

    def save(self, directory: str = "", *, format: Literal["pt", "npz", "csv"] = "pt") -> None:  # noqa: A002 (skrl's name)
        """Write the tensors to a new file in the folder `memories` of a directory. The file is complete or absent.

        Args:
            directory: The directory; if it is empty, `export_directory`.
            format: "pt" and "npz" hold whole tensors, "csv" the rows present.

        Raises:
            OptionError: The format is unknown.
            StorageMemoryError: The disk is full.
        """
        check_choice("format", format, _FORMATS)
        folder = Path(directory or self.export_directory) / "memories"
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().astimezone().strftime("%y-%m-%d_%H-%M-%S-%f")
        state = self._steps_present().cpu()
        data = {name: self.tensors[name].cpu() for name in self.get_tensor_names()}
        file = io.BytesIO()
        if format == "pt":
            torch.save({**data, _STATE: state}, file)
        elif format == "npz":
            np.savez(file, **{name: tensor.numpy() for name, tensor in {**data, _STATE: state}.items()})  # type: ignore[arg-type]
        else:
            file.write(_as_csv({name: x.flatten(0, 1)[: len(self)].flatten(1) for name, x in data.items()}))
        atomic_write(folder / f"{stamp}_memory_{hex(id(self))}.{format}", file.getbuffer())

    def load(self, path: str) -> None:
        """Read a "pt" or "npz" file, also one of skrl's own memory, in place of the rows present.

        Rows are stored from index 0 on, the oldest first, without those of an incomplete step. Of more steps than
        `memory_size` the last ones are kept.

        Raises:
            CheckpointNotFoundError: There is no such file.
            KeyMissingError: The file lacks a tensor that was created.
            NotImplementedError: The file is a "csv" file.
            OptionError: The file has another suffix.
            SchemaError: A tensor has another shape.
        """
        data = _read(path)
        missing = [name for name in self.get_tensor_names() if name not in data]
        if missing:
            msg = f"{path} has the tensors {sorted(data)}, but not {missing}, which were created"
            raise KeyMissingError(msg)
        for name, tensor in self.tensors.items():
            if data[name].shape[1:] != tensor.shape[1:]:
                held = list(data[name].shape[1:])
                msg = f"{path} has the tensor {name!r} with steps of shape {held}, not {list(tensor.shape[1:])}"
                raise SchemaError(msg)
        order = data.get(_STATE, torch.arange(_written(data), device="cpu"))
        self.reset()
        if order.numel():
            self._store({name: data[name][order].flatten(0, 1).to(tensor) for name, tensor in self.tensors.items()})


@final
class _DistinctRows(Sampler):
    """Draws different rows, each set of them with equal probability; all rows if there are fewer."""

    row_values = ()

    def __repr__(self) -> str:
        """Show the class."""
        return "_DistinctRows()"

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw among the rows that may be drawn."""
        rows = view.rows if view.starts is None else view.starts.rows
        picked = draw_distinct(rows, min(batch_size, rows), generator, view.device)
        return Draw(picked if view.starts is None else view.starts.at(picked))


def _blank(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaN, or 0 for dtypes without it."""
    return torch.full(tuple(shape), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def _count(size: Any) -> int:
    """Return the numbers of a row: for a space those that skrl stores of its values."""
    if isinstance(size, (int, float)):
        return int(size)
    if isinstance(size, (tuple, list)):
        return math.prod(size)
    spaces = require("gymnasium.spaces")
    if isinstance(size, spaces.Discrete):
        return 1
    if isinstance(size, spaces.MultiDiscrete):
        return len(size.nvec)
    if isinstance(size, (spaces.Tuple, spaces.Dict)):
        return sum(map(_count, size.values() if isinstance(size, spaces.Dict) else size))
    return int(spaces.flatdim(size))


def _divided(columns: list[Tensor | None], parts: int) -> list[list[Tensor | None]]:
    """Divide columns along the rows, as `numpy.array_split` does."""
    pieces = [[None] * positive("mini_batches", parts) if x is None else x.tensor_split(parts) for x in columns]
    return [[piece[i] for piece in pieces] for i in range(parts)]


def _row_bytes(tensor: Tensor) -> Tensor:
    """Return rows as bytes, `[rows, bytes]`, so that NaN equals NaN."""
    return tensor.flatten(1).contiguous().view(torch.uint8)


def _as_csv(columns: dict[str, Tensor]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([f"{name}.{i}" for name, column in columns.items() for i in range(column.shape[1])])
    for row in zip(*(column.tolist() for column in columns.values()), strict=True):
        writer.writerow([number for part in row for number in part])
    return text.getvalue().encode()


def _read(path: str) -> dict[str, Tensor]:
    """Read a file without executing code in it."""
    suffix = Path(path).suffix
    if suffix not in {".pt", ".npz"}:
        _raise_suffix(path, suffix)
    try:
        if suffix == ".pt":
            found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
            return found
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    except FileNotFoundError:
        msg = f"there is no {path}"
        raise CheckpointNotFoundError(msg) from None


def _raise_suffix(path: str, suffix: str) -> NoReturn:
    if suffix == ".csv":
        msg = f"{path} has no dtypes and sizes: save in the format 'pt' or 'npz' to load"
        raise NotImplementedError(msg)
    msg = f"{path} must end with .pt or .npz, got {suffix!r}"
    raise OptionError(msg)


def _written(data: dict[str, Tensor]) -> int:
    """Return the steps of a file of skrl's own memory: those up to the last one with a float that is not NaN."""
    known = [(~x.isnan()).flatten(1).any(1).nonzero() for x in data.values() if x.is_floating_point()]
    return max((int(rows.max()) + 1 if len(rows) else 0 for rows in known), default=len(next(iter(data.values()))))
