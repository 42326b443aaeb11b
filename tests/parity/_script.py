"""Programs that run with both libraries: each call is noted, and the notes are compared."""

from __future__ import annotations

import functools
import importlib
import inspect
import reprlib
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Library", "Note", "Raised", "both", "raw", "rows"]

_HOMES = {
    "torchrl": (
        "torchrl.data",
        "torchrl.data.replay_buffers",
        *(
            f"torchrl.data.replay_buffers.{module}"
            for module in ("samplers", "storages", "writers", "scheduler", "query", "offline_to_online")
        ),
    ),
    "ostinato": ("ostinato",),
}
_FAMILIES = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
    FileNotFoundError,
)

_END = "the end of the loop"


class Library:
    """The public names of a library, `torchrl` or `ostinato`, as attributes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        """Return a name from the first module that has it."""
        modules = map(importlib.import_module, _HOMES[self.name])
        return next(getattr(module, name) for module in modules if hasattr(module, name))


class Raised(NamedTuple):
    """An error, and the families of built-in errors that it belongs to."""

    families: frozenset[str]
    name: str
    message: str


class Note:
    """What happened in one run of a program.

    Attributes:
        library: The name of the library.
        steps: What was called, what came of it, and whether any error is as good as another.
    """

    def __init__(self, library: str) -> None:
        self.library = library
        self.steps: list[tuple[str, object, bool]] = []
        self._refusing = False
        self._objects: list[object] = []

    def __call__(self, value: object) -> None:
        """Note a value."""
        self.run("note", lambda: value)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Each call in this block must fail, with whatever error."""
        self._refusing = True
        yield
        self._refusing = False

    def run(self, label: str, action: Callable[[], object], *, without: str = "") -> Any:
        """Note what an action returns or how it fails; return it, watched if it is an object of the library."""
        try:
            found: Any = action()
            self.steps.append((label, self.describe(found, without), self._refusing))
        except Exception as error:
            families = frozenset(base.__name__ for base in _FAMILIES if isinstance(error, base))
            self.steps.append((label, Raised(families, type(error).__name__, str(error)[:200]), self._refusing))
            return None
        return self.watch(found)

    def watch(self, found: Any) -> Any:
        """Return an object whose calls are noted; values that are no object of a library as they are."""
        return Watched(found, self) if type(found).__module__.split(".")[0] in _HOMES else found

    def describe(self, value: Any, without: str = "") -> object:
        """Turn a value into plain comparable Python: kinds, dtypes, shapes and contents; objects by their number."""
        again = functools.partial(self.describe, without=without)
        if isinstance(value, TensorDictBase):
            fields = {key: again(value.get(key)) for key in value.keys(True, True) if key != without}
            return ("TensorDict", tuple(value.batch_size), fields)
        if is_tensorclass(value):
            return (type(value).__name__, again(value.to_tensordict()))
        if isinstance(value, torch.Tensor):  # a MemoryMappedTensor and a Tensor are the same to a user's code
            return ("Tensor", str(value.dtype), tuple(value.shape), value.tolist())
        if isinstance(value, np.ndarray | np.generic):
            return ("numpy", str(value.dtype), value.shape, value.tolist())
        if isinstance(value, dict):
            return ("dict", {key: again(item) for key, item in value.items()})
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, list | tuple):
            return (type(value).__name__, [again(item) for item in value])
        if isinstance(value, Watched) or self.watch(value) is not value:
            there = raw(value)
            if not any(there is one for one in self._objects):
                self._objects.append(there)
            return (type(there).__name__, next(i for i, one in enumerate(self._objects) if one is there))
        return value


class Watched:
    """A library, a class or an object of it: calls, reads and errors are noted, and after an error the program goes on.

    The field `index` of rows read back is left out: TorchRL stores it, ours is added to samples.
    """

    def __init__(self, target: Any, note: Note) -> None:
        vars(self).update(_target=target, _note=note)

    def __getattr__(self, name: str) -> Any:
        """Note an attribute; a method or a class notes its calls."""
        value = getattr(self._target, name, None)
        if callable(value) and (inspect.isclass(value) or self._note.watch(value) is value):
            return Watched(value, self._note)
        return self._note.run(name, lambda: getattr(self._target, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self._note.run(name, lambda: setattr(self._target, name, raw(value)))

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Call a method or a class."""
        name = getattr(self._target, "__name__", "call")
        label = f"{name}({reprlib.repr(given)}, {reprlib.repr(options)})"
        kept = "" if name in {"sample", "extend"} else "index"
        return self._note.run(label, lambda: self._target(*raw(given), **raw(options)), without=kept)

    def __getitem__(self, index: Any) -> Any:
        """Read rows."""
        return self._note.run(f"[{index!r}]", lambda: self._target[index], without="index")

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write rows."""
        self._note.run(f"[{index!r}] =", lambda: self._target.__setitem__(index, value))

    def __iter__(self) -> Iterator[Any]:
        """Note what a loop gives, up to its end."""
        iterator: list[Any] = []
        self._note.run("iter", lambda: iterator.append(iter(self._target)))
        while iterator and (found := self._note.run("next", lambda: next(iterator[0], _END))) is not _END:
            yield found

    def __len__(self) -> int:
        """Note the length."""
        return int(self._note.run("len", lambda: len(self._target)))


def raw(value: Any) -> Any:
    """Return what is watched, also within containers."""
    if isinstance(value, Watched):
        return value._target
    if type(value) in {list, tuple}:
        return type(value)(map(raw, value))
    return {key: raw(item) for key, item in value.items()} if type(value) is dict else value


def both(test: Callable[..., None]) -> Callable[..., None]:
    """Run a program `(lib, note, ...)` with both libraries, each from seed 0, and compare what it noted."""

    @functools.wraps(test)
    def compared(**arguments: Any) -> None:
        notes = [Note(name) for name in _HOMES]
        for note in notes:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                test(Watched(Library(note.library), note), note, **arguments)
        theirs, ours = (note.steps for note in notes)
        assert theirs, "the program noted nothing"
        for (label, expected, refused), (_, got, _) in zip(theirs, ours, strict=True):
            assert _agree(expected, got, refused=refused), f"{label}:\n  torchrl : {expected}\n  ostinato: {got}"

    signature = inspect.signature(test)
    given = [parameter for name, parameter in signature.parameters.items() if name not in {"lib", "note"}]
    compared.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]  # pytest reads it
    return compared


def _agree(expected: object, got: object, *, refused: bool) -> bool:
    if isinstance(expected, Raised) and isinstance(got, Raised):
        return refused or bool(expected.families & got.families)
    return not refused and expected == got


def rows(count: int, start: int = 0) -> TensorDict:
    """Return rows whose every field tells the row: `obs` = number, `next.obs` = number + 1."""
    numbers = torch.arange(start, start + count, dtype=torch.float32)
    return TensorDict({"obs": numbers, "next": {"obs": numbers + 1}}, [count])
