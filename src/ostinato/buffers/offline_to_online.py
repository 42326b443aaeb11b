"""From a dataset to one's own experience: batches of both in an exact ratio, and buffers filled from a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato._optional import require
from ostinato.buffers.checkpoint.load import with_state
from ostinato.buffers.checkpoint.save import save_buffer
from ostinato.buffers.checkpoint.state import read_generator
from ostinato.buffers.ensemble import ReplayBufferEnsemble, check_buffers
from ostinato.buffers.mixing import EnsembleEngine, Member, OwnDraws, adds_names, without_names
from ostinato.buffers.options import check_generator, part, positive
from ostinato.buffers.reader import Reader
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.routed import require_names
from ostinato.core.options import check_number
from ostinato.durable.progress import BYTES, Progress
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError
from ostinato.samplers import SamplerEnsemble
from ostinato.storages import LazyTensorStorage, Storage
from ostinato.storages.checkpoint import readable

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from torch import Tensor

    from ostinato.core.episodes.tracker import Key
    from ostinato.durable.progress import ProgressOption
    from ostinato.samplers.ensemble import Rounding, WhenEmpty


@final
class OfflineToOnlineReplayBuffer(ReplayBufferEnsemble):
    """A fixed dataset and a growing buffer, of which every batch holds an exact ratio, as in TorchRL.

    A batch of `B` rows has `round(offline_fraction * B)` rows of the dataset, followed by rows of the online buffer.
    With `rounding="carry"` the fractions of a row that this leaves count for the next batch, so that the ratio of all
    batches is exact. While the online buffer is empty all rows are of the dataset, and none once `anneal` has reached
    0. `extend` writes to the online buffer alone.

    It is a `ReplayBufferEnsemble` of two members with `ratio=offline_fraction` under TorchRL's names; the class itself
    has also schedules, more members, prefetch, and checkpoints of all members. Samples of TensorDicts carry names of
    their rows (`("index", "buffer_ids")`, 0 for the dataset, and `("index", "index")`) and `priority_weight` only if
    one of the two is prioritized.

    Datasets that an ensemble cannot draw from (of another library, shared between processes, or with a `rate_limiter`)
    are sampled by their own `sample(n)`: their rows have no names.

    Safe to use from several threads.

    Args:
        offline_dataset: a `ReplayBuffer`, what `open_dataset` returns, a dataset of TorchRL (any object with
            `sample(n)` and a length), or the name of one, such as `"minari:mujoco/hopper/expert-v0"`, which TorchRL
            loads; it must be installed then.
        online_storage: storage of the online buffer, or else
        online_capacity: rows of a `LazyTensorStorage` for it, or else
        online_buffer: the online buffer, such as one with priorities.
        offline_fraction: share of the dataset, in (0, 1).
        batch_size: rows that `sample()` gives; needed with the name of a dataset.
        transform: for whole batches: a callable, or an object with `forward`.
        rounding: "nearest" rounds each batch on its own, "carry" makes the ratio of all batches exact.
        when_empty: "fill" lets the dataset fill batches while the online buffer has no row to draw; "renormalize" does
            so with a warning, "raise" raises EmptyBufferError.
        source_key: field of batches that gets 0 for rows of the dataset and 1 for the others, int64; transforms see it.
        generator: source of all draws; None lets each of the two use its own.
        **dataset_kwargs: for the constructor of a dataset that is given by its name.

    Raises:
        OptionError: for options out of range, or that exclude each other.
        KindError: if the dataset cannot be sampled.
        MissingExtraError: if the dataset is a name and TorchRL is not installed.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> demos = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> index = demos.extend({"demo": torch.ones(100)})
        >>> rb = OfflineToOnlineReplayBuffer(demos, online_capacity=1000, offline_fraction=0.25, batch_size=8)
        >>> rb.sample()["demo"]
        tensor([1., 1., 1., 1., 1., 1., 1., 1.])
        >>> index = rb.extend({"demo": torch.zeros(10)})
        >>> rb.sample()["demo"]
        tensor([1., 1., 0., 0., 0., 0., 0., 0.])
    """

    def __init__(
        self,
        offline_dataset: Any,
        *,
        online_storage: Storage | None = None,
        online_capacity: int | None = None,
        online_buffer: ReplayBuffer | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Any = None,
        rounding: Rounding = "nearest",
        when_empty: WhenEmpty = "fill",
        source_key: Key | None = None,
        generator: torch.Generator | None = None,
        **dataset_kwargs: Any,
    ) -> None:
        words = "in (0, 1): for one of the two use it alone"
        self._base = check_number("offline_fraction", offline_fraction, words, lambda share: 0 < share < 1, KindError)
        size = None if batch_size is None else positive("batch_size", batch_size)
        self._online = _online(online_storage, online_capacity, online_buffer)
        self._offline = _dataset(offline_dataset, size, dataset_kwargs)
        buffers = self._offline, self._online
        members: list[Member | OwnDraws] = [OwnDraws(buffer) for buffer in buffers]
        if _mixable(self._offline, self._online):
            check_buffers(buffers)
            members = [Member(buffer, None) for buffer in buffers]
        elif generator is not None:
            msg = f"{type(self._offline).__name__} draws by itself, from its own source: leave generator= out"
            raise OptionError(msg)
        sampler = SamplerEnsemble(
            *(member.sampler for member in members), ratio=self._base, rounding=rounding, when_empty=when_empty
        )
        engine = EnsembleEngine(members, sampler, None, check_generator(generator), flatten=True, named=False)
        self._join(engine, size, transform, source_key, None)

    @property
    def offline_buffer(self) -> Any:
        """The dataset."""
        return self._offline

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The buffer that `extend` writes to."""
        return self._online

    @property
    def offline_fraction(self) -> float:
        """Share of the dataset now; `anneal` changes it."""
        return float(self._engine.sampler.share or 0)

    def add(self, data: Any, *, timeout_s: float | None = None) -> Any:
        """Add one row to the online buffer; see `ReplayBuffer.add`."""
        return self._online.add(data, timeout_s=timeout_s)

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows to the online buffer; see `ReplayBuffer.extend`.

        Returns:
            Their slots there, int64 `[B]`.
        """
        return self._online.extend(data, update_priority=update_priority, timeout_s=timeout_s)

    def empty(self, empty_write_count: bool = True) -> None:  # noqa: FBT001, FBT002
        """Forget all rows of the online buffer; those of the dataset stay. See `ReplayBuffer.empty`."""
        self._online.empty(empty_write_count)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
        min_batch: int | None = None,
        out: Any = None,
    ) -> Any:
        """Draw a batch: rows of the dataset, then rows of the online buffer.

        Args:
            batch_size: rows; None takes the constructor's.
            return_info: return `(batch, info)`; the info names the rows, as that of `ReplayBufferEnsemble`.
            max_age: must be None, as must `timeout_s` and `min_batch`: no call waits.
            timeout_s: see `max_age`.
            min_batch: see `max_age`.
            out: an earlier batch, to which the rows are copied; see `ReplayBuffer.sample`.

        Returns:
            The rows, `[B, *shape]`, transformed. Copy.

        Raises:
            OptionError: if there is no batch size.
            EmptyBufferError: if the dataset is empty.
            KindError: if rows of both cannot be put together; names the fields that differ, and how to rename them.
            UsageError: with `return_info` if the dataset draws by itself.
        """
        if batch_size is None and self._batch_size is None:
            msg = "batch_size must be provided either in the constructor or to sample()"
            raise OptionError(msg)
        if len(self._offline) == 0 and self._engine.sampler.share:
            msg = "Cannot sample from an empty storage: the dataset holds no rows"
            raise EmptyBufferError(msg)
        if return_info:
            require_names(self._engine.engines)
        return super().sample(
            batch_size, return_info, max_age=max_age, timeout_s=timeout_s, min_batch=min_batch, out=out
        )

    def anneal(self, step: int, total_steps: int) -> None:
        """Set the share of the dataset to `offline_fraction * (1 - step / total_steps)`, at least 0.

        Args:
            step: of the training, from 0 on.
            total_steps: step at which the share is 0.

        Raises:
            OptionError: if a number is out of range.
        """
        words = "a number of at least 0"
        done = check_number("step of anneal()", step, words, lambda number: number >= 0, KindError)
        end = check_number("total_steps of anneal()", total_steps, "above 0", lambda number: number > 0, KindError)
        self._engine.sampler.share = self._base * max(0.0, 1.0 - done / end)

    def _state(self) -> dict[str, Any]:
        """Return the state of the online buffer, and that of the mixture; nothing is copied."""
        engine = self._engine
        mixture = {
            "mixing": engine.sampler.state_dict(),
            "generator": None if engine.generator is None else engine.generator.get_state(),
            "draws": _draws_of(engine.engines[0]) if engine.engines else None,
        }
        return {**self._online._state(), "offline": mixture}  # noqa: SLF001 (one package)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy; sampling goes on exactly where it was.

        The rows of the dataset are not part of it; its sampler and generator are, unless it draws by itself.

        Raises:
            CheckpointError: if the state does not fit; nothing is changed.
        """
        if "offline" not in state:
            msg = "this is the state of a buffer, without a dataset: load it with online_buffer.loads(path)"
            raise CheckpointError(msg)
        engine, online = self._engine, self._online._engine  # noqa: SLF001 (one package)
        mixture, rest = state["offline"], {key: value for key, value in state.items() if key != "offline"}
        with online.saves.lock, engine.lock:
            with readable("this mixture"):
                engine.sampler.check_state(mixture["mixing"])
                generator = read_generator(mixture["generator"], self._online.storage.device)
                draws = mixture["draws"] if engine.engines else None
                source = None if draws is None else _check_draws(engine.engines[0], draws)
            self._online.load_state_dict(rest)
            engine.sampler.load_state_dict(mixture["mixing"])
            engine.generator = with_state(engine.generator, generator)
            if draws is not None:
                dataset = engine.engines[0]
                dataset.parts_changed()
                dataset.sampler.load_state_dict(draws["sampler"])
                dataset.begin_sampler()
                dataset.generator = with_state(dataset.generator, source)

    def dumps(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Save the online buffer, and where mixing and draws are, to the directory `path`.

        The rows of the dataset are not saved: give the same dataset before `loads`. Its sampler and generator are,
        unless it draws by itself. The checkpoint is one of the online buffer with more entries: `ReplayBuffer.loads`
        reads it, too. Options, costs and errors are those of `ReplayBuffer.dumps`.
        """
        engine, online = self._engine, self._online._engine  # noqa: SLF001 (one package)
        with Progress(progress, "save", unit=BYTES):
            self._pipeline.settle()
            self._online.synchronize()
            if engine.engines:
                mine = [engine.engines[1]]
                save_buffer(path, mine, self._state, locked=lambda: engine.lock, incremental=incremental)
            else:
                online.save(path, self._state, incremental=incremental)

    def loads(
        self, path: str | Path, *, verify: bool = True, mmap: bool = False, progress: ProgressOption = None
    ) -> None:
        """Restore what `dumps` saved; options and errors are those of `ReplayBuffer.loads`."""
        online = self._online._engine  # noqa: SLF001 (one package)
        with Progress(progress, "load", unit=BYTES), online.saves.lock, self._engine.lock, online.lock:
            online.load(path, self.load_state_dict, verify=verify, mmap=mmap)

    save = dump = dumps
    load = loads

    def __len__(self) -> int:
        """Rows of the dataset and of the online buffer."""
        return len(self._offline) + len(self._online)

    def __repr__(self) -> str:
        """Dataset, share and sizes."""
        return (
            f"OfflineToOnlineReplayBuffer(offline={type(self._offline).__name__}, offline_size={len(self._offline)}, "
            f"offline_fraction={self.offline_fraction:.3f}, online_size={len(self._online)}, "
            f"batch_size={self._batch_size})"
        )


def _online(storage: Any, capacity: int | None, buffer: Any) -> ReplayBuffer:
    """Return the online buffer.

    Raises:
        OptionError: if it is not given in one way.
        KindError: if something is not of its class.
    """
    if sum(given is not None for given in (storage, capacity, buffer)) != 1:
        msg = (
            "Provide one of online_storage or online_capacity (or online_buffer): online_storage OR online_capacity, "
            "not both, and neither with online_buffer"
        )
        raise OptionError(msg)
    if capacity is not None:
        storage = LazyTensorStorage(positive("online_capacity", capacity))
    made = ReplayBuffer(storage=part("online_storage", storage, Storage)) if buffer is None else buffer
    if not isinstance(made, ReplayBuffer):
        msg = f"online_buffer must be a ReplayBuffer, got {type(made).__name__}"
        raise KindError(msg)
    return made


def _mixable(dataset: Any, online: ReplayBuffer) -> bool:
    """Whether an ensemble can draw from a dataset.

    Raises:
        OptionError: if it cannot, and the dataset has priorities.
    """
    if not isinstance(dataset, ReplayBuffer) or isinstance(dataset, ReplayBufferEnsemble):
        return False
    sampler = dataset.sampler
    able = (
        isinstance(dataset._engine, Reader)  # noqa: SLF001
        and dataset.rate_limiter is None
        and not sampler.counting
        and not (sampler.epochal and sampler.episodes is not None)
        and dataset.storage.ndim == online.storage.ndim
    )
    if not able and sampler.prioritized:
        msg = (
            f"the dataset draws by priorities ({type(sampler).__name__}), and its rows cannot be named: it is shared, "
            "has a rate_limiter, or another storage.ndim than the online buffer"
        )
        raise OptionError(msg)
    return able


def _draws_of(engine: Reader) -> dict[str, Any]:
    """Return the state of the draws of a dataset: all but its rows."""
    return {
        "class": type(engine.sampler).__name__,
        "rows": len(engine.storage),
        "fingerprint": getattr(engine.storage, "fingerprint", None),  # of a dataset of files
        "sampler": engine.sampler.state_dict(),
        "generator": None if engine.generator is None else engine.generator.get_state(),
    }


def _check_draws(engine: Reader, state: dict[str, Any]) -> torch.Generator | None:
    """Check what `_draws_of` returned, and return the generator in it.

    Raises:
        CheckpointError: if the checkpoint was made with another dataset or sampler.
    """
    now = _draws_of(engine)
    for name, what in (
        ("class", "a sampler of the class"),
        ("rows", "a dataset of rows:"),
        ("fingerprint", "a dataset"),
    ):
        if state[name] != now[name]:
            msg = (
                f"the checkpoint was made with {what} {state[name]!r}, this one has {now[name]!r}: give the same "
                "dataset, with the same episodes, fields and sampler"
            )
            raise CheckpointError(msg)
    engine.sampler.check_state(state["sampler"], len(engine.storage))
    return read_generator(state["generator"], engine.storage.device)


def prefill_replay_buffer(
    rb: ReplayBuffer, dataset: Any, n_samples: int | None = None, chunk_size: int = 1000
) -> ReplayBuffer:
    """Copy rows of a dataset into a buffer, each at most once and in the order of the dataset.

    So the episodes of a dataset stay whole if all of it is copied. Transforms of the dataset run, and the inverse ones
    of the buffer. Cost: one copy; `chunk_size` rows are in memory at a time.

    Args:
        rb: the buffer.
        dataset: a `ReplayBuffer`, whose oldest row is copied first, what `open_dataset` returns, a dataset of TorchRL,
            or the name of one; see `OfflineToOnlineReplayBuffer`.
        n_samples: most rows to copy, drawn uniformly without replacement if the dataset has more; None copies all.
        chunk_size: rows that are copied at a time.

    Returns:
        The buffer.

    Raises:
        OptionError: for numbers out of range, a dataset with `storage.ndim=2`, one whose rows leave as they are drawn,
            or one that is the buffer.
        KindError: if the dataset has no rows to read, or `rb` cannot be extended.
        SchemaError: if the rows do not match those of the buffer; rows copied before stay.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, prefill_replay_buffer
        >>> dataset, rb = (ReplayBuffer(storage=LazyTensorStorage(500)) for _ in range(2))
        >>> index = dataset.extend({"obs": torch.arange(500)})
        >>> len(prefill_replay_buffer(rb, dataset, n_samples=200))
        200
    """
    if not callable(getattr(rb, "extend", None)):
        msg = f"rb must be a replay buffer to copy rows into, got {type(rb).__name__}"
        raise KindError(msg)
    chunk = positive("chunk_size", chunk_size)
    wanted = positive("n_samples", n_samples) if n_samples else n_samples
    source = _dataset(dataset, chunk, {})
    if source is rb:
        msg = "the dataset is the buffer itself: give another one"
        raise OptionError(msg)
    if not hasattr(source, "__getitem__") or isinstance(source, ReplayBufferEnsemble):
        msg = f"a dataset must have rows to read, dataset[i:j], got {type(source).__name__}"
        raise KindError(msg)
    if isinstance(source, ReplayBuffer) and source.sampler.leaves:
        msg = f"rows of the dataset leave as they are drawn ({source.sampler!r}): use rb.extend(dataset.sample(n))"
        raise OptionError(msg)
    if getattr(getattr(source, "storage", None), "ndim", 1) > 1:
        msg = "a dataset with storage.ndim=2 has steps of several environments: copy them with rb.extend(dataset[:])"
        raise OptionError(msg)
    rows, oldest = len(source), _oldest(source)
    part_of = wanted is not None and wanted < rows
    chosen = torch.randperm(rows, device="cpu")[:wanted].sort().values if part_of else torch.arange(rows, device="cpu")
    for ages in torch.split(chosen, chunk) if rows else ():
        index = (ages + oldest) % rows
        whole = not part_of and int(index[-1]) - int(index[0]) == len(index) - 1
        data = source[slice(int(index[0]), int(index[-1]) + 1) if whole else index]
        rb.extend(without_names(data) if adds_names(source) else data)
    return rb


def _oldest(dataset: Any) -> int:
    """Return where the oldest row of a dataset is: a full ring continues at its first slot after the last one."""
    if not isinstance(dataset, ReplayBuffer) or not dataset.writer.in_order:
        return 0
    return dataset.cursor if len(dataset.storage) == dataset.storage.capacity else 0


def _dataset(given: Any, batch_size: int | None, options: dict[str, Any]) -> Any:
    """Return a dataset that can be sampled, loaded if it is a name."""
    if isinstance(given, str):
        if "batch_size" not in options and batch_size is None:
            msg = f"batch_size must be provided when offline_dataset is a string, got {given!r}: it needs one"
            raise OptionError(msg)
        loader: ModuleType = require("torchrl.data.datasets.utils", "datasets")
        given = loader.load_dataset(given, **{"batch_size": batch_size, **options})
    elif options:
        msg = (
            f"dataset_kwargs are only forwarded when offline_dataset is a string, got {sorted(options)}: give them to "
            "the constructor of the dataset"
        )
        raise OptionError(msg)
    from ostinato.datasets import DatasetStorage

    if isinstance(given, DatasetStorage):
        given = ReplayBuffer(storage=given)
    if not (callable(getattr(given, "sample", None)) and hasattr(given, "__len__")):
        msg = (
            "a dataset must be a ReplayBuffer, what open_dataset returns, another object with sample(n) and a length, "
            f"or the name of a dataset of TorchRL, got {type(given).__name__}"
        )
        raise KindError(msg)
    return given
