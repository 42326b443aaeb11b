"""From a dataset to one's own experience: batches of both in an exact ratio, and buffers filled from a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato._optional import require
from ostinato.buffers.options import check_size, part, positive, real
from ostinato.buffers.replay import ReplayBuffer
from ostinato.core import kinds
from ostinato.errors import CheckpointError, KindError, OptionError, UsageError
from ostinato.storages import LazyTensorStorage, Storage
from ostinato.transforms import Compose

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from torch import Tensor

__all__ = ["OfflineToOnlineReplayBuffer", "prefill_replay_buffer"]

_OWN_KEYS = ("index", "priority_weight", "index_generation")
"""Keys that buffers of TensorDicts add to rows; those of a dataset name no rows of the result."""


@final
class OfflineToOnlineReplayBuffer:
    """A fixed dataset and a growing buffer, of which every batch holds an exact ratio, as in TorchRL.

    A batch of `B` rows has `round(offline_fraction * B)` rows of the dataset, followed by rows of the online buffer.
    While the online buffer is empty all rows are of the dataset, and none once `anneal` has reached 0. `extend` writes
    to the online buffer alone.

    Each of the two draws with its own sampler and generator. Samples carry no `index`: a `ReplayBufferEnsemble` with
    `flatten=True` names the rows of both, brings priorities back, and saves both in one checkpoint.

    Safe to use from several threads. Not a `ReplayBuffer`: it has two of them.

    Args:
        offline_dataset: a `ReplayBuffer`, a dataset of TorchRL (any object with `sample(n)` and a length), or the name
            of one, such as `"minari:mujoco/hopper/expert-v0"`, which TorchRL loads; it must be installed then.
        online_storage: storage of the online buffer, or else
        online_capacity: rows of a `LazyTensorStorage` for it.
        offline_fraction: share of the dataset, in (0, 1).
        batch_size: rows that `sample()` gives; needed with the name of a dataset.
        transform: for whole batches: a callable, or an object with `forward`.
        **dataset_kwargs: for the constructor of a dataset that is given by its name.

    Raises:
        OptionError: for options out of range, or that exclude each other.
        KindError: if the dataset cannot be sampled.
        MissingExtraError: if the dataset is a name and TorchRL is not installed.

    Example:
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
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Any = None,
        **dataset_kwargs: Any,
    ) -> None:
        if (online_storage is None) == (online_capacity is None):
            given = "neither" if online_storage is None else "both"
            said = (
                "Provide one of online_storage or online_capacity"
                if online_storage is None
                else ("Provide online_storage OR online_capacity, not both")
            )
            msg = f"{said}, got {given}"
            raise OptionError(msg)
        if not 0.0 < real("offline_fraction", offline_fraction) < 1.0:
            msg = f"offline_fraction must be in (0, 1), got {offline_fraction!r}: for one of the two use it alone"
            raise OptionError(msg)
        self._batch_size = None if batch_size is None else positive("batch_size", batch_size)
        storage = LazyTensorStorage(online_capacity) if online_capacity is not None else online_storage
        self._online = ReplayBuffer(storage=part("online_storage", storage, Storage))
        self._offline = _dataset(offline_dataset, self._batch_size, dataset_kwargs)
        self._base = self._fraction = float(offline_fraction)
        self._transform = Compose.of(transform)

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
        return self._fraction

    @property
    def batch_size(self) -> int | None:
        """Rows that `sample()` gives; None if the constructor was given none."""
        return self._batch_size

    @property
    def transform(self) -> Compose:
        """The chain of transforms of whole batches."""
        return self._transform

    def add(self, data: Any) -> Any:
        """Add one row to the online buffer; see `ReplayBuffer.add`."""
        return self._online.add(data)

    def extend(self, data: Any) -> Tensor:
        """Add rows to the online buffer; see `ReplayBuffer.extend`.

        Returns:
            Their slots there, int64 `[B]`.
        """
        return self._online.extend(data)

    def sample(self, batch_size: int | None = None) -> Any:
        """Draw a batch: rows of the dataset, then rows of the online buffer.

        Args:
            batch_size: rows; None takes the constructor's.

        Returns:
            The rows, `[B, *shape]`, transformed. Copy.

        Raises:
            OptionError: if there is no batch size.
            EmptyBufferError: if the dataset is empty.
            SchemaError: if rows of both cannot be put together.
        """
        if batch_size is None and self._batch_size is None:
            msg = "batch_size must be provided either in the constructor or to sample()"
            raise OptionError(msg)
        size = check_size(batch_size, self._batch_size, fixed=False)
        offline = size if len(self._online) == 0 else round(self._fraction * size)
        parts = []
        if offline:
            parts += [_plain(batch, self._offline) for batch in _draw(self._offline, offline)]
        if offline < size:
            parts.append(self._online.sample(size - offline))
        batch = parts[0] if len(parts) == 1 else kinds.concatenate(parts)
        return self._transform.forward(batch) if self._transform.steps else batch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches, without end.

        Raises:
            UsageError: if the constructor was given no batch size.
        """
        if self._batch_size is None:
            msg = "Cannot iterate over the replay buffer: batch_size was not specified when it was made"
            raise UsageError(msg)
        while True:
            yield self.sample()

    def anneal(self, step: int, total_steps: int) -> None:
        """Set the share of the dataset to `offline_fraction * (1 - step / total_steps)`, at least 0.

        Args:
            step: of the training, from 0 on.
            total_steps: step at which the share is 0.

        Raises:
            OptionError: if a number is out of range.
        """
        done, end = real("step", step), real("total_steps", total_steps)
        if not (end > 0 and done >= 0):
            msg = f"anneal() needs step >= 0 and total_steps > 0, got step={step} and total_steps={total_steps}"
            raise OptionError(msg)
        self._fraction = self._base * max(0.0, 1.0 - done / end)

    def state_dict(self) -> dict[str, Any]:
        """Return the online buffer's state and the share of the dataset. Copy.

        The dataset is not part of it. For a checkpoint in a directory use `online_buffer.dumps` and `anneal`.
        """
        return {"online": self._online.state_dict(), "offline_fraction": self._fraction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy.

        Raises:
            CheckpointError: if the state does not fit; nothing is changed.
        """
        fraction = state.get("offline_fraction")
        if not isinstance(fraction, float) or not 0.0 <= fraction < 1.0 or "online" not in state:
            msg = f"the state must hold `online` and `offline_fraction` in [0, 1), got {sorted(map(str, state))}"
            raise CheckpointError(msg)
        self._online.load_state_dict(state["online"])
        self._fraction = fraction

    def __len__(self) -> int:
        """Rows of the dataset and of the online buffer."""
        return len(self._offline) + len(self._online)

    def __repr__(self) -> str:
        """Dataset, share and sizes."""
        return (
            f"OfflineToOnlineReplayBuffer(offline={type(self._offline).__name__}, offline_size={len(self._offline)}, "
            f"offline_fraction={self._fraction:.3f}, online_size={len(self._online)}, batch_size={self._batch_size})"
        )


def prefill_replay_buffer(
    rb: ReplayBuffer, dataset: Any, n_samples: int | None = None, chunk_size: int = 1000
) -> ReplayBuffer:
    """Copy rows of a dataset into a buffer, each at most once and in the order of the dataset.

    So the episodes of a dataset stay whole if all of it is copied. Transforms of the dataset run, and the inverse ones
    of the buffer. Cost: one copy; `chunk_size` rows are in memory at a time.

    Args:
        rb: the buffer.
        dataset: a `ReplayBuffer`, whose oldest row is copied first, a dataset of TorchRL, or the name of one; see
            `OfflineToOnlineReplayBuffer`.
        n_samples: most rows to copy, drawn uniformly without replacement if the dataset has more; None copies all.
        chunk_size: rows that are copied at a time.

    Returns:
        The buffer.

    Raises:
        OptionError: for numbers out of range, a dataset with `storage.ndim=2`, one whose rows leave as they are drawn,
            or one that is the buffer.
        KindError: if the dataset has no rows to read, or `rb` cannot be extended.
        SchemaError: if the rows do not match those of the buffer; rows copied before stay.

    Example:
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
    if isinstance(source, ReplayBuffer) and source.sampler.leaves:
        msg = f"rows of the dataset leave as they are drawn ({source.sampler!r}): use rb.extend(dataset.sample(n))"
        raise OptionError(msg)
    if not hasattr(source, "__getitem__"):
        msg = f"a dataset must have rows to read, dataset[i:j], got {type(source).__name__}"
        raise KindError(msg)
    if getattr(getattr(source, "storage", None), "ndim", 1) > 1:
        msg = "a dataset with storage.ndim=2 has steps of several environments: copy them with rb.extend(dataset[:])"
        raise OptionError(msg)
    rows, oldest = len(source), _oldest(source)
    part_of = wanted is not None and wanted < rows
    chosen = torch.randperm(rows, device="cpu")[:wanted].sort().values if part_of else torch.arange(rows, device="cpu")
    for ages in torch.split(chosen, chunk) if rows else ():
        index = (ages + oldest) % rows
        whole = not part_of and int(index[-1]) - int(index[0]) == len(index) - 1
        rb.extend(_plain(source[slice(int(index[0]), int(index[-1]) + 1) if whole else index], source))
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
    if not (callable(getattr(given, "sample", None)) and hasattr(given, "__len__")):
        msg = (
            "a dataset must be a ReplayBuffer, another object with sample(n) and a length, or the name of a dataset of "
            f"TorchRL, got {type(given).__name__}"
        )
        raise KindError(msg)
    if isinstance(given, ReplayBuffer) and given.sampler.prioritized:
        msg = (
            f"the dataset draws by priorities ({type(given.sampler).__name__}), whose weights and updates need the "
            "names of rows: use ReplayBufferEnsemble(dataset, online, flatten=True)"
        )
        raise OptionError(msg)
    return given


def _draw(dataset: Any, rows: int) -> list[Any]:
    """Draw rows of a dataset, in several batches where passes end within them."""
    if not (isinstance(dataset, ReplayBuffer) and dataset.sampler.epochal):
        return [dataset.sample(rows)]
    batches = []
    while rows > 0:
        batch, info = dataset.sample(rows, return_info=True)
        index = info["index"]
        rows -= len(index[0] if isinstance(index, tuple) else index)
        batches.append(batch)
    return batches


def _plain(batch: Any, dataset: Any) -> Any:
    """Return rows of a dataset without the keys that it adds; those of a plain `ReplayBuffer` are its own fields."""
    if type(dataset) is ReplayBuffer or not kinds.is_tensordict(batch):
        return batch
    return batch.exclude(*_OWN_KEYS)
