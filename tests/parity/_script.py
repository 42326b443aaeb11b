"""Parity scripts: the two libraries' names, a notebook of what happened, and how notebooks compare."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Note", "Raised", "both", "compare", "describe", "library", "outcome", "rows"]

_NAMES = (
    "ReplayBuffer",
    "TensorDictReplayBuffer",
    "PrioritizedReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "HERReplayBuffer",
    "OfflineToOnlineReplayBuffer",
    "ReplayBufferEnsemble",
    "Storage",
    "CompressedListStorage",
    "LazyStackStorage",
    "ListStorage",
    "TensorStorage",
    "LazyTensorStorage",
    "LazyMemmapStorage",
    "StorageEnsemble",
    "Sampler",
    "RandomSampler",
    "SamplerWithoutReplacement",
    "PrioritizedSampler",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "PrioritizedSliceSampler",
    "ConsumingSampler",
    "StalenessAwareSampler",
    "PromptGroupSampler",
    "StreamingSliceSampler",
    "Sequence",
    "SamplerEnsemble",
    "Writer",
    "RoundRobinWriter",
    "TensorDictRoundRobinWriter",
    "ImmutableDatasetWriter",
    "TensorDictMaxValueWriter",
    "WriterEnsemble",
    "TED2Flat",
    "Flat2TED",
    "TED2Nested",
    "Nested2TED",
    "FlatStorageCheckpointer",
    "NestedStorageCheckpointer",
    "H5StorageCheckpointer",
    "ParameterScheduler",
    "LambdaScheduler",
    "LinearScheduler",
    "StepScheduler",
    "SchedulerList",
)
_HOMES = {
    "torchrl": (
        "torchrl.data",
        "torchrl.data.replay_buffers.storages",
        "torchrl.data.replay_buffers.samplers",
        "torchrl.data.replay_buffers.writers",
        "torchrl.data.replay_buffers",
        "torchrl.data.replay_buffers.scheduler",
    ),
    "ostinato": ("ostinato",),
}
_BUILTIN_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
    FileNotFoundError,
)


class Raised(NamedTuple):
    """An error, by the families of built-in errors it belongs to; the message is for reading only."""

    families: frozenset[str]
    name: str
    message: str

    def __str__(self) -> str:
        """Name and message."""
        return f"{self.name}: {self.message}"


class Note:
    """Notebook of one run: `note(label, action)` keeps what the action returned or how it failed."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, object, bool]] = []

    def __call__(self, label: str, action: Callable[[], object]) -> None:
        """Keep what the action returns; both libraries must return the same, or fail in the same family of errors."""
        self.steps.append((label, outcome(action), False))

    def rows(self, label: str, action: Callable[[], object]) -> None:
        """Keep rows read back, without the key `index`: TorchRL stores it, ours is added to samples."""
        self.steps.append((label, _without_index(outcome(action)), False))

    def refusal(self, label: str, action: Callable[[], object]) -> None:
        """Keep that the action fails; both libraries must refuse it, with whatever error."""
        self.steps.append((label, outcome(action), True))


def both(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test `(lib, note, ...)` with both libraries, each from seed 0, and compare the notes that it took."""

    @functools.wraps(test)
    def compared(**arguments: Any) -> None:
        notes = []
        for name in ("torchrl", "ostinato"):
            notes.append(Note())
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                test(library(name), notes[-1], **arguments)
        assert notes[0].steps, "the test noted nothing"
        differences = compare(*notes)
        assert not differences, "\n".join(differences)

    signature = inspect.signature(test)
    given = [parameter for name, parameter in signature.parameters.items() if name not in {"lib", "note"}]
    compared.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]  # pytest reads it
    return compared


def library(name: str) -> Any:
    """Return a library's public names of this comparison as attributes.

    Args:
        name: `torchrl` or `ostinato`.
    """
    modules = [importlib.import_module(home) for home in _HOMES[name]]
    found = {public: next(getattr(m, public) for m in modules if hasattr(m, public)) for public in _NAMES}
    return SimpleNamespace(name=name, **found)


def rows(count: int, start: int = 0) -> TensorDict:
    """Return rows whose every field tells the row: `obs` = number, `next.obs` = number + 1."""
    numbers = torch.arange(start, start + count, dtype=torch.float32)
    return TensorDict({"obs": numbers, "next": {"obs": numbers + 1}}, [count])


def outcome(action: Callable[[], object]) -> object:
    """Return the description of what an action returns, or the error it raises."""
    try:
        return describe(action())
    except Exception as error:
        families = frozenset(base.__name__ for base in _BUILTIN_ERRORS if isinstance(error, base))
        return Raised(families, type(error).__name__, str(error)[:200])


def describe(value: Any) -> object:
    """Turn a value into plain comparable Python: kinds, dtypes, shapes and contents, no identities."""
    if isinstance(value, TensorDictBase):
        return (
            "TensorDict",
            tuple(value.batch_size),
            {key: describe(value.get(key)) for key in value.keys(True, True)},
        )
    if is_tensorclass(value):
        return (type(value).__name__, describe(value.to_tensordict()))
    if isinstance(value, torch.Tensor):  # a MemoryMappedTensor and a Tensor are the same to a user's code
        return ("Tensor", str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, np.ndarray | np.generic):
        return ("numpy", str(value.dtype), value.shape, value.tolist())
    if isinstance(value, dict):
        return ("dict", {key: describe(item) for key, item in value.items()})
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, list | tuple):
        return (type(value).__name__, [describe(item) for item in value])
    return value


def _without_index(described: object) -> object:
    if isinstance(described, tuple) and described[:1] == ("TensorDict",):
        return (*described[:2], {key: value for key, value in described[2].items() if key != "index"})
    if isinstance(described, tuple) and described[:1] in {("list",), ("tuple",)}:
        return (described[0], [_without_index(item) for item in described[1]])
    return described


def compare(theirs: Note, ours: Note) -> list[str]:
    """Return the steps on which two notebooks differ, as readable lines."""
    differences = []
    for (label, expected, any_error), (other, got, _) in zip(theirs.steps, ours.steps, strict=True):
        assert label == other
        if not _agrees(expected, got, any_error=any_error):
            differences.append(f"{label}:\n  torchrl : {expected}\n  ostinato: {got}")
    return differences


def _agrees(expected: object, got: object, *, any_error: bool) -> bool:
    if isinstance(expected, Raised) and isinstance(got, Raised):
        return any_error or bool(expected.families & got.families)
    return not any_error and expected == got
