"""Queries: predicates over whole trajectories, and the trajectories of a buffer or of a batch that they select."""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.episodes.continuity import DEFAULT_DONE_KEYS, find_start_stop_traj
from ostinato.core.episodes.tracker import as_path
from ostinato.core.kinds import Node, show_path
from ostinato.core.records import Request
from ostinato.errors import KeyMissingError, KindError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ostinato.buffers.reader import Reader
    from ostinato.buffers.trajectory_view import Trajectory
    from ostinato.core.episodes.tracker import Key
    from ostinato.storages import Storage
    from ostinato.transforms import Compose

Path: TypeAlias = "tuple[str, ...]"
Keys: TypeAlias = "frozenset[Key] | None"
_Compared = TypeVar("_Compared")

_ID_KEYS: tuple[Path, ...] = (("collector", "traj_ids"), ("traj_ids",), ("episode",))
_FLAG_KEYS: tuple[tuple[Path, ...], ...] = (
    tuple(("next", key) for key in DEFAULT_DONE_KEYS),
    tuple((key,) for key in DEFAULT_DONE_KEYS),
)

# -- expressions -------------------------------------------------------------------------------------------------------


class TrajectoryPredicate:
    """A condition on a trajectory: a comparison of `traj` expressions, or a function. Combine with `&`, `|` and `~`.

    Args:
        fn: called with a `Trajectory`; its result is converted to a bool.
        description: text for the repr.
        keys: fields that `fn` reads, at the root or under `next`; None if that is not known. A query reads only these
            fields of trajectories that are not selected.

    Examples:
        >>> from ostinato import traj
        >>> (traj.reward.sum() > 100) & (traj.length < 200)
        TrajectoryPredicate(((traj.reward.sum() > 100) & (traj.length < 200)))
    """

    def __init__(self, fn: Callable[[Trajectory], Any], description: str = "predicate", keys: Keys = None) -> None:
        self._fn = fn
        self._description = description
        self._keys = keys

    def required_keys(self) -> Keys:
        """Return the fields that the predicate reads; None if that is not known."""
        return self._keys

    def __call__(self, trajectory: Trajectory) -> bool:
        """Evaluate the predicate."""
        return bool(self._fn(trajectory))

    def __and__(self, other: TrajectoryPredicate) -> TrajectoryPredicate:
        """Both hold; the other is evaluated only if this one does."""
        text = f"({self._description} & {other._description})"
        return _combine(lambda t: self(t) and other(t), text, self, other)

    def __or__(self, other: TrajectoryPredicate) -> TrajectoryPredicate:
        """One of them holds; the other is evaluated only if this one does not."""
        text = f"({self._description} | {other._description})"
        return _combine(lambda t: self(t) or other(t), text, self, other)

    def __invert__(self) -> TrajectoryPredicate:
        """It does not hold."""
        return _combine(lambda t: not self(t), f"~{self._description}", self)

    def __bool__(self) -> bool:
        """Raise: `and`, `or`, `not` and chained comparisons cannot be overloaded.

        Raises:
            KindError: always.
        """
        msg = (
            f"{self._description} has no truth value without a trajectory: combine predicates with & | ~ instead of "
            "and, or, not, and write (a < x) & (x < b) instead of a < x < b"
        )
        raise KindError(msg)

    def __repr__(self) -> str:
        """The expression."""
        return f"TrajectoryPredicate({self._description})"


class _Expression(TrajectoryPredicate):
    """A predicate that uses no more of a trajectory than `get`, `length` and `total_reward`."""


def _combine(fn: Callable[[Trajectory], Any], description: str, *parts: TrajectoryPredicate) -> TrajectoryPredicate:
    """Return a predicate of predicates, which needs what each of them needs."""
    needed = [part.required_keys() for part in parts]
    keys = None if None in needed else frozenset().union(*(one for one in needed if one is not None))
    kind = _Expression if all(isinstance(part, _Expression) for part in parts) else TrajectoryPredicate
    return kind(fn, description, keys)


class _Value:
    """A value in an expression."""

    def __init__(self, fn: Callable[[Trajectory], Any], description: str, keys: Keys) -> None:
        self._fn = fn
        self._description = description
        self._keys = keys

    def __repr__(self) -> str:
        """The expression."""
        return f"{type(self).__name__}({self._description})"


class _Comparable(_Value, Generic[_Compared]):
    """A value that can be compared."""

    def _compare(self, compare: Callable[[Any, Any], Any], other: Any, symbol: str) -> _Compared:
        """Return what tells whether the comparison holds."""
        text = f"({self._description} {symbol} {other!r})"
        return self._compared(lambda t: compare(self._fn(t), other), text, self._keys)

    _compared: Callable[..., _Compared]
    """What a comparison makes."""

    def __gt__(self, other: Any) -> _Compared:
        """Greater than a value."""
        return self._compare(operator.gt, other, ">")

    def __ge__(self, other: Any) -> _Compared:
        """At least a value."""
        return self._compare(operator.ge, other, ">=")

    def __lt__(self, other: Any) -> _Compared:
        """Less than a value."""
        return self._compare(operator.lt, other, "<")

    def __le__(self, other: Any) -> _Compared:
        """At most a value."""
        return self._compare(operator.le, other, "<=")

    def __eq__(self, other: object) -> _Compared:  # type: ignore[override]
        """Equal to a value."""
        return self._compare(operator.eq, other, "==")

    def __ne__(self, other: object) -> _Compared:  # type: ignore[override]
        """Not equal to a value."""
        return self._compare(operator.ne, other, "!=")

    __hash__ = None  # type: ignore[assignment]


@final
class ElementwisePredicate(_Value):
    """A comparison of each row of a trajectory: `any()` or `all()` make a `TrajectoryPredicate` of it."""

    def any(self) -> TrajectoryPredicate:
        """It holds for one row at least."""
        return _Expression(lambda t: self._fn(t).any(), f"{self._description}.any()", self._keys)

    def all(self) -> TrajectoryPredicate:
        """It holds for all rows."""
        return _Expression(lambda t: self._fn(t).all(), f"{self._description}.all()", self._keys)

    def ambiguous(self) -> KindError:
        """Return the error for a use as a predicate."""
        msg = (
            f"{self._description} compares per-transition values and is ambiguous as a trajectory filter. Call .any() "
            "or .all() to reduce it to a single boolean"
        )
        return KindError(msg)

    def __call__(self, trajectory: Trajectory | None = None) -> bool:  # noqa: ARG002
        """Raise.

        Raises:
            KindError: always.
        """
        raise self.ambiguous()

    def __bool__(self) -> bool:
        """Raise.

        Raises:
            KindError: always.
        """
        raise self.ambiguous()


@final
class ScalarExpression(_Comparable[TrajectoryPredicate]):
    """A number of a trajectory: a comparison makes a `TrajectoryPredicate` of it."""

    _compared = _Expression


@final
class FieldExpression(_Comparable[ElementwisePredicate]):
    """A field of a trajectory: reduce it to a number, or compare its rows."""

    _compared = ElementwisePredicate

    def __init__(self, key: Key, description: str) -> None:
        path = as_path(key)
        self._key: Key = path[0] if len(path) == 1 else path
        super().__init__(self._value, description, frozenset({self._key}))

    def _value(self, trajectory: Trajectory) -> Tensor:
        value = trajectory.get(self._key)
        if value is None:
            known = sorted(map(str, trajectory.data.keys(include_nested=True, leaves_only=True)))
            msg = f"Key {self._key!r} not found in trajectory, neither at the root nor under 'next': it has {known}"
            raise KeyMissingError(msg)
        return cast("Tensor", value)

    def _reduce(self, reduce: Callable[[Tensor], Tensor], name: str) -> ScalarExpression:
        return ScalarExpression(lambda t: reduce(self._value(t)), f"{self._description}.{name}()", self._keys)

    def sum(self) -> ScalarExpression:
        """Sum over all rows."""
        return self._reduce(torch.sum, "sum")

    def mean(self) -> ScalarExpression:
        """Mean over all rows, as float32 for integers."""
        return self._reduce(lambda x: (x if x.is_floating_point() else x.float()).mean(), "mean")

    def max(self) -> ScalarExpression:
        """Maximum over all rows."""
        return self._reduce(torch.max, "max")

    def min(self) -> ScalarExpression:
        """Minimum over all rows."""
        return self._reduce(torch.min, "min")

    def first(self) -> ScalarExpression:
        """Value of the first row."""
        return self._reduce(lambda x: x[0], "first")

    def last(self) -> ScalarExpression:
        """Value of the last row."""
        return self._reduce(lambda x: x[-1], "last")


@final
class TrajectoryFields:
    """The trajectory in an expression, `traj`: attributes and keys are its fields.

    `traj.reward` is the field `reward` at the root, or else under `next`; `traj["a", "b"]` a nested field. Reductions
    (`sum`, `mean`, `max`, `min`, `first`, `last`) make numbers, comparisons make predicates.

    Examples:
        >>> from ostinato import traj
        >>> traj.reward.sum() > 100
        TrajectoryPredicate((traj.reward.sum() > 100))
        >>> (traj["next", "reward"] > 10).any().required_keys()
        frozenset({('next', 'reward')})
    """

    @property
    def length(self) -> ScalarExpression:
        """Number of rows; reads no field."""
        return ScalarExpression(lambda t: t.length, "traj.length", frozenset())

    @property
    def total_reward(self) -> ScalarExpression:
        """Sum of the rewards."""
        return ScalarExpression(lambda t: t.total_reward, "traj.total_reward", frozenset({"reward"}))

    def __getattr__(self, name: str) -> FieldExpression:
        """Return the field of this name."""
        if name.startswith("_"):
            raise AttributeError(name)
        return FieldExpression(name, f"traj.{name}")

    def __getitem__(self, key: Key) -> FieldExpression:
        """Return the field at a key."""
        return FieldExpression(key, f"traj[{key!r}]")

    def __repr__(self) -> str:
        """`traj`."""
        return "traj"


traj = TrajectoryFields()
"""The trajectory in an expression; see `TrajectoryFields`."""


def check_predicate(predicate: object) -> None:
    """Check that a predicate decides about whole trajectories.

    Raises:
        KindError: if it compares single rows, or is not callable.
    """
    if isinstance(predicate, ElementwisePredicate):
        raise predicate.ambiguous()
    if predicate is not None and not callable(predicate):
        msg = f"a predicate is a traj expression or a function of a Trajectory, got {predicate!r}"
        raise KindError(msg)


# -- trajectories of a batch -------------------------------------------------------------------------------------------


class Signal(NamedTuple):
    """What tells trajectories from each other."""

    ids: Path | None
    """Field of their ids."""
    flags: tuple[Path, ...]
    """Flags of their last rows, if there are no ids."""

    @classmethod
    def find(cls, has: Callable[[Path], bool], key: Key | None) -> Signal:
        """Return what rows have: the key given, or else usual ids, or else flags, with a warning.

        Raises:
            KeyMissingError: if the rows have none of them.
        """
        wanted = _ID_KEYS if key is None else (as_path(key),)
        found = next((path for path in wanted if has(path)), None)
        if found is not None:
            return cls(found, ())
        if key is not None:
            msg = f"trajectory_key {key!r} not found in data: name a field of the rows, or leave it out"
            raise KeyMissingError(msg)
        for group in _FLAG_KEYS:
            flags = tuple(path for path in group if has(path))
            if flags:
                names = ", ".join(map(show_path, flags))
                text = (
                    f"No trajectory id entry was found; splitting on the end-of-episode flags {names}. A trajectory "
                    "whose last row has no flag is merged with the next one: store trajectory ids, such as "
                    "('collector', 'traj_ids'), or pass trajectory_key"
                )
                warnings.warn(text, UserWarning, stacklevel=4)
                return cls(None, flags)
        msg = (
            "Cannot split data into trajectories: there is no trajectory id entry "
            f"({', '.join(map(show_path, _ID_KEYS))}) and no end-of-episode flag ({', '.join(DEFAULT_DONE_KEYS)}), at "
            "the root or under 'next'. Pass trajectory_key"
        )
        raise KeyMissingError(msg)

    def lengths(self, read: Callable[[Path], Tensor], rows: int, num_envs: int = 1) -> list[int]:
        """Return the number of rows of each trajectory, for rows in order, environment after environment."""
        steps = rows // num_envs
        if self.ids is not None:
            ids = read(self.ids).reshape(num_envs, steps).T
            return find_start_stop_traj(trajectory=ids, at_capacity=False)[2].tolist()
        ends = torch.stack([read(path).reshape(num_envs, steps).T.bool() for path in self.flags]).any(0)
        return find_start_stop_traj(end=ends, at_capacity=False)[2].tolist()


def iter_trajectories(data: Any, trajectory_key: Key | None = None) -> Iterator[Trajectory]:
    """Iterate over the trajectories of rows.

    Adjacent rows belong together if they have the same id: that under `trajectory_key`, or else under `("collector",
    "traj_ids")`, `"traj_ids"` or `"episode"`. Without ids, rows with `done`, `terminated` or `truncated`, under `next`
    or else at the root, end a trajectory, with a warning.

    Args:
        data: TensorDict `[rows]`, in order.
        trajectory_key: field of ids.

    Yields:
        `Trajectory` objects: views.

    Raises:
        KindError: if the data is not a TensorDict (also a `TypeError`).
        SchemaError: if it has another number of batch dimensions (also a `ValueError`).
        KeyMissingError: if it has neither ids nor flags (also a `KeyError`).
    """
    if not kinds.is_tensordict(data):
        msg = f"iter_trajectories expects a TensorDictBase, got {type(data)}: make a TensorDict of the rows"
        raise KindError(msg)
    from ostinato.buffers.trajectory_view import Trajectory

    if data.batch_dims != 1:
        msg = f"iter_trajectories expects data with a single batch dimension, got batch_size={list(data.batch_size)}"
        raise SchemaError(msg)
    if not data.batch_size[0]:
        return
    signal = Signal.find(lambda path: data.get(path, None) is not None, trajectory_key)
    start = 0
    for rows in signal.lengths(data.get, data.batch_size[0]):
        yield Trajectory(data[start : start + rows])
        start += rows


def filter_trajectories(
    data: Any, predicate: Callable[[Trajectory], Any] | None = None, *, trajectory_key: Key | None = None
) -> list[Trajectory]:
    """Return the trajectories of rows for which a predicate holds; see `iter_trajectories`.

    Args:
        data: TensorDict `[rows]`, in order.
        predicate: a `traj` expression, or a function of a `Trajectory`; None selects all.
        trajectory_key: field of ids.

    Raises:
        KindError: if the predicate compares single rows.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import filter_trajectories, traj
        >>> rows = TensorDict({"traj_ids": torch.tensor([0, 0, 1, 1, 1]), "reward": torch.arange(5.0)}, [5])
        >>> [found.length for found in filter_trajectories(rows, traj.reward.sum() > 5)]
        [3]
    """
    check_predicate(predicate)
    return [one for one in iter_trajectories(data, trajectory_key) if predicate is None or predicate(one)]


# -- trajectories of a buffer ------------------------------------------------------------------------------------------


def run_query(
    engine: Reader, transform: Compose, predicate: Callable[[Trajectory], Any] | None, key: Key | None
) -> list[Trajectory]:
    """Return the trajectories of a buffer for which a predicate holds; see `ReplayBuffer.query`."""
    kinds.require_tensordict("query()", "read the rows with rb[:], a SliceSampler, or rb.export()")
    from ostinato.buffers.trajectory_view import Trajectory

    check_predicate(predicate)
    if engine.storage.shared:
        msg = "a shared buffer cannot be queried: other processes replace rows meanwhile. Query a copy of its rows"
        raise UsageError(msg)
    with engine.lock:
        if not len(engine.storage):
            return []
        stored = _Stored(engine.storage)
        slots, lengths = _slots_of_trajectories(engine, stored, key)
        found = torch.split(slots, lengths)
        read = getattr(predicate, "required_keys", None)
        keys: Keys = read() if callable(read) else None
        leaves = None if keys is None or (keys and transform) else stored.leaves_of(keys)
        if leaves is None:
            whole = (Trajectory(transform.forward(stored.rows(one))) for one in found)
            return [one for one in whole if predicate is None or predicate(one)]
        if isinstance(predicate, _Expression) and all(len(of_key) == 1 for of_key in leaves.values()):
            parts: Iterable[Any] = stored.parts({key: path for key, [path] in leaves.items()}, slots, lengths)
        else:
            paths = {path for of_key in leaves.values() for path in of_key}
            parts = map(Trajectory, stored.fields(list(paths), slots).split(lengths))
        chosen = [i for i, part in enumerate(parts) if predicate(part)]  # type: ignore[misc]
        return [Trajectory(transform.forward(stored.rows(found[i]))) for i in chosen]


class _Part(NamedTuple):
    """What expressions use of a `Trajectory`."""

    length: int
    values: dict[Key, Tensor]

    def get(self, key: Key) -> Tensor | None:
        """Return a field."""
        return self.values.get(key)

    @property
    def total_reward(self) -> Tensor:
        """Sum of the rewards."""
        return self.values["reward"].sum()


@final
class _Stored:
    """The rows of a storage as TensorDicts."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        schema = storage.schema
        self.leaves: list[Path] = [] if schema is None else [tuple(map(str, leaf.path)) for leaf in schema.leaves]
        self._probe: Any = None

    def has(self, path: Path) -> bool:
        """Whether rows have a field; of storages without a schema, the first row."""
        if path in self.leaves:
            return True
        if self._probe is None:
            self._probe = self.rows(torch.zeros(1, dtype=torch.int64, device=self.storage.device))
        return self._probe.get(path, None) is not None

    def field(self, path: Path, slots: Tensor) -> Tensor:
        """Return one field of rows, `[n, ...]`; no other field is read if the storage has it as a leaf. Copy."""
        if path in self.leaves:
            return self._read([path], slots)[0]
        value = self.rows(slots).get(path)
        if not isinstance(value, Tensor):
            msg = f"{show_path(path)} must hold one number per row to tell trajectories from each other"
            raise SchemaError(msg)
        return value

    def _read(self, paths: Iterable[Path], slots: Tensor) -> list[Tensor]:
        """Return some leaves of rows. Copy."""
        requests = [Request(self.leaves.index(path), slots) for path in paths]
        return self.storage.fetch(requests) if requests else []

    def fields(self, paths: Sequence[Path], slots: Tensor) -> Any:
        """Return some leaves of rows as a TensorDict `[n]`, and read no others. Copy."""
        rows = kinds.make(Node("tensordict", ()), (), (slots.shape[0],), self.storage.device)
        for path, value in zip(paths, self._read(paths, slots), strict=True):
            rows.set(path, value)
        return rows

    def leaves_of(self, keys: Iterable[Key]) -> dict[Key, list[Path]] | None:
        """Return the leaves that `Trajectory.get` finds at each key; None if there are none for one of them."""
        found: dict[Key, list[Path]] = {}
        for key in keys:
            path = as_path(key)
            places = [path] if len(path) > 1 else [path, ("next", *path)]
            at_places = ([leaf for leaf in self.leaves if leaf[: len(at)] == at] for at in places)
            found[key] = next(filter(None, at_places), [])
        return found if all(found.values()) else None

    def parts(self, leaves: dict[Key, Path], slots: Tensor, lengths: list[int]) -> Iterator[_Part]:
        """Yield the fields of each trajectory that expressions use: faster than a `Trajectory` for each."""
        columns = [torch.split(value, lengths) for value in self._read(leaves.values(), slots)]
        for i, length in enumerate(lengths):
            yield _Part(length, {name: column[i] for name, column in zip(leaves, columns, strict=True)})

    def rows(self, slots: Tensor) -> Any:
        """Return whole rows as a TensorDict `[n]`, of a list storage as a lazy stack. Copy.

        Raises:
            KindError: if rows have no named fields.
        """
        data = self.storage.present(self.storage.gather(slots), (slots.shape[0],))
        if isinstance(data, list) and data and all(map(kinds.is_tensor_collection, data)):
            if any(row.batch_dims for row in data):
                msg = "ReplayBuffer.query on a list-based storage expects single-transition (scalar) items"
                raise KindError(msg)
            return kinds.lazy_stack(data).clone()
        if not kinds.is_mapping(data):
            got = type(data[0]) if isinstance(data, list) and data else type(data)
            msg = f"ReplayBuffer.query requires a tensordict-backed storage (TensorDicts or dicts), got rows of {got}"
            raise KindError(msg)
        return kinds.as_tensordict(data, slots.shape[0])


def slots_in_order(engine: Reader) -> Tensor:
    """Return the slots of rows in the order of a ring, the oldest first, int64 `[rows]`; with `ndim=2` the steps."""
    storage = engine.storage
    steps = len(storage) // storage.num_envs
    oldest = engine.ring.cursor // storage.num_envs if len(storage) == storage.capacity else 0
    return torch.arange(steps, device=storage.device).roll(-oldest)


def _slots_of_trajectories(engine: Reader, stored: _Stored, key: Key | None) -> tuple[Tensor, list[int]]:
    """Return all slots, environment after environment, the oldest first, and the rows of each trajectory."""
    storage = engine.storage
    rows, num_envs = len(storage), storage.num_envs
    signal = Signal.find(stored.has, key)
    slots = slots_in_order(engine)
    chosen = engine.sampler.leaves or not engine.writer.in_order or engine.store.remover is not None
    if num_envs == 1 and chosen:  # rows choose their slots
        known = engine.ring.arrivals(slots)
        slots = slots[known.argsort()][int((known == 0).sum()) :]  # without those that were deleted
        rows = slots.shape[0]
    if num_envs > 1:
        slots = (slots * num_envs + torch.arange(num_envs, device=storage.device).unsqueeze(1)).flatten()
    return slots, signal.lengths(lambda path: stored.field(path, slots), rows, num_envs)
