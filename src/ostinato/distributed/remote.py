"""Methods of remote buffers: each is one line, made of the method of the local buffer.

`delete = remote(ReplayBuffer.delete, drops=True)` declares a method with name, signature and docstring of
`ReplayBuffer.delete`, and with `timeout_s`. The options say how it is called, see `Method`. A line in `RemoteBuffer` is
a method of buffers in one actor and of shards; one in a subclass is a method of that alone.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from itertools import chain
from operator import itemgetter
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    Never,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    final,
    overload,
)

from ostinato.buffers import ReplayBuffer
from ostinato.buffers.options import check_seconds, positive
from ostinato.distributed.actor_names import connect, names_of
from ostinato.distributed.deadlines import Deadline
from ostinato.errors import LostBufferError, NoAnswerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future
    from types import TracebackType

    from ostinato.buffers.updates import UpdateQueue
    from ostinato.distributed.actor_names import ActorNames


Time: TypeAlias = float | Deadline | None
"""The time of a call: in seconds, None for the default, or the deadline of a call that this one is a part of."""
_P = ParamSpec("_P")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_C = TypeVar("_C", bound=type)


# -- one line for each method -----------------------------------------------------------------------------------------


class Method(NamedTuple):
    """How a method of `ReplayBuffer` is called."""

    name: str
    kind: Literal["answer", "write", "work"] = "answer"
    """Whether the answer is due at once, the call may wait for readers, or it may work for long; see `deadlines`. Only
    a write that has changed nothing is sent again."""
    settles: bool = False
    """Whether updates that the handle has submitted are written first."""
    drops: bool = False
    """Whether batches that the handle has requested ahead are dropped first."""
    prepare: Callable[[Any, dict[str, Any]], None] = lambda *_: None
    """Gets the handle and the arguments given, which it may check and change: in this process, before all else."""
    progress: Callable[[dict[str, Any]], AbstractContextManager[Any]] = lambda _: nullcontext()
    """Gets the keyword arguments; returns what shows the progress of the call."""
    via: Callable[..., Any] | None = None
    """Makes the call, with the handle, the deadline and the arguments; None sends it to every actor."""
    reduce: Callable[[list[Any]], Any] = itemgetter(0)
    """Makes one result of those of several shards; by default the first one."""


class RemoteCall(Protocol[_P, _R_co]):
    """A method of a handle: that of the local buffer, and `timeout_s`."""

    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    @overload
    def __call__(self, *args: Any, timeout_s: float | None, **kwargs: Any) -> _R_co: ...


class RemoteMethod(Protocol[_P, _R_co]):
    """The type of a function that `remote` has made, as an attribute of a class."""

    def __get__(self, buffer: object, owner: type | None = None) -> RemoteCall[_P, _R_co]:
        """Return the method of a handle."""


def remote(
    method: Callable[Concatenate[Any, _P], _R], kind: Any = "answer", note: str = "", **options: Any
) -> RemoteMethod[_P, _R]:
    """Return a method of a remote buffer.

    Args:
        method: That of the local buffer.
        kind: See `Method`, as for the options.
        note: What is different here, for the docstring.
        **options: The other fields of `Method`.
    """
    made = Method(method.__name__, kind, **options)
    signature = _with_timeout(inspect.signature(method))

    @wraps(method)
    def call(buffer: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(buffer, *args, **kwargs)
        timeout_s = given.arguments.pop("timeout_s", None)
        made.prepare(buffer, given.arguments)
        return buffer._call(made, timeout_s, *given.args[1:], **given.kwargs)  # noqa: SLF001 (of its own methods)

    summary, _, rest = (inspect.getdoc(method) or "").partition("\n\n")
    vars(call)["__signature__"], call.__doc__ = signature, "\n\n".join(filter(None, (summary, note, rest)))
    return cast("RemoteMethod[_P, _R]", call)


def _with_timeout(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the keyword `timeout_s`."""
    parameters = dict(signature.parameters)
    rest = [parameters.pop(name) for name in list(parameters) if parameters[name].kind is inspect.Parameter.VAR_KEYWORD]
    annotation = "float | None"
    timeout = inspect.Parameter("timeout_s", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return signature.replace(parameters=[*{**parameters, "timeout_s": timeout}.values(), *rest])


def unavailable(method: Callable[Concatenate[Any, _P], object], why: str) -> RemoteMethod[_P, Never]:
    """Return a method that remote buffers do not have: it raises `UsageError`.

    Args:
        method: That of the local buffer.
        why: The message.
    """

    @wraps(method)
    def call(buffer: Any, /, *_: Any, **__: Any) -> Never:  # noqa: ARG001
        raise UsageError(why)

    call.__doc__ = "Raise `UsageError`: not available for a remote buffer."
    return cast("RemoteMethod[_P, Never]", call)


@final
class RemoteProperty(property, Generic[_R]):
    """A property of the local buffer, which each read asks for; the counterpart of `remote`.

    Args:
        of: The property.
        **options: Fields of `Method`.
    """

    def __init__(self, of: Any, **options: Any) -> None:
        made = Method(of.fget.__name__, **options)

        def get(buffer: Any) -> Any:
            made.prepare(buffer, {})
            return buffer._call(made, None)  # noqa: SLF001 (of its own properties)

        def set_(buffer: Any, value: _R) -> None:
            made.prepare(buffer, {})
            buffer.apply(setattr, made.name, value)

        super().__init__(get, None if of.fset is None else set_)
        self.__doc__ = of.__doc__

    def __get__(self, buffer: Any, owner: type | None = None) -> _R:  # type: ignore[override]  # read of a handle
        """Return the value."""
        found: _R = super().__get__(buffer, owner)
        return found


def in_actor(of: Any) -> RemoteProperty[Never]:
    """Return the property of a part that is only accessible in the actor: reading it raises `UsageError`."""
    name = of.fget.__name__

    def get(_: object) -> Never:
        msg = (
            f"the buffer's {name} is in its actor, and a copy of it here would change nothing there: call "
            f"rb.apply(lambda rb: ... rb.{name} ...)"
        )
        raise UsageError(msg)

    return cast("RemoteProperty[Never]", property(get, doc=of.__doc__))


def named(cls: _C) -> _C:
    """Give methods made of others the names under which pickle and the documentation find them in their class."""
    for member in vars(cls).values():
        if isinstance(member, FunctionType) and hasattr(member, "__wrapped__"):
            member.__module__, member.__qualname__ = cls.__module__, f"{cls.__qualname__}.{member.__name__}"
    return cls


# -- what all remote buffers have -------------------------------------------------------------------------------------


@named
class RemoteBuffer(ABC):
    """A handle of a buffer in actors, or of several that are used as one."""

    _another: str
    """How to get another buffer with the rows of one that was closed."""
    _updates: UpdateQueue
    """Updates that this handle has submitted."""
    _iteration: Iterator[Any] | None = None
    """That of `next`."""
    update_if_present: Any

    @abstractmethod
    def _call(self, method: Method, time: Time, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer, or read a property."""

    @abstractmethod
    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a handle to the same actors."""

    @abstractmethod
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect to the actors."""

    @classmethod
    @abstractmethod
    def _find(cls, names: ActorNames, timeout_s: float) -> dict[str, Any]:
        """Find the actors of a buffer; return the state of a handle."""

    @abstractmethod
    def _silent(self) -> object:
        """Return who does not answer, for messages."""

    @property
    @abstractmethod
    def _call_timeout_s(self) -> float:
        """Time of calls without `timeout_s`."""

    @abstractmethod
    def _end(self, timeout_s: float | None) -> None:
        """End the buffer, or what a handle of `client()` holds; wait for Ray at most `timeout_s`, None is 10 s."""

    @abstractmethod
    def apply(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Call `function(buffer, *args)` in the actors."""

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Rows of a batch; None if the constructor got no `batch_size`."""

    @abstractmethod
    def sample(self, batch_size: int | None = None) -> Any:
        """Draw a batch."""

    @classmethod
    def attach(
        cls,
        name: str,
        namespace: str | None = None,
        *,
        timeout_s: float = 60.0,
        ray_init_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a handle to the buffer that was made with `name`, by any program that is connected to the cluster.

        It is like the handle of the constructor: its `close` ends the buffer for all.

        Args:
            name: The name.
            namespace: Namespace of the name, if the constructor got one.
            timeout_s: Longest wait for the actors, some of which may be restarting.
            ray_init_config: Arguments of `ray.init`, if this process is not connected to Ray yet; None connects to the
                cluster of this machine, or to that of `RAY_ADDRESS`.

        Raises:
            LostBufferError: There is no such buffer, or its actors are gone for good.
            NoAnswerError: Its actors do not answer in time.
            OptionError: The name is invalid.
        """
        check_seconds("timeout_s", timeout_s)
        names = names_of(cls.__name__, name, namespace)
        connect(ray_init_config)
        return cls._of_state(cls._find(names, timeout_s))

    @classmethod
    def _of_state(cls, state: dict[str, Any]) -> Self:
        handle = object.__new__(cls)
        handle.__setstate__(state)
        return handle

    def _handle(self, **changes: Any) -> Self:
        """Return another handle, with other fields of its state."""
        return self._of_state({**self.__getstate__(), **changes})

    def __enter__(self) -> Self:
        """Return the handle; the end of the block calls `close`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the buffer, for all handles."""
        self.close()

    def close(self) -> None:
        """End the actors, and with them the rows, for all handles: later calls raise `LostBufferError`.

        Checkpoints stay. May be called again. On a handle of `client()` it drops what that handle holds, and no more.
        Waits for an actor that does not answer at most 5 s before it ends it.
        """
        self._end(None)

    def shutdown(self, timeout: float | None = None) -> None:
        """Finish the updates submitted by this handle, then `close`, which does not wait for other handles.

        Args:
            timeout: Longest wait for these updates, by default `call_timeout_s`, and for Ray to end the actors, by
                default 10 s. They end in any case.

        Raises:
            NoAnswerError: The updates are not finished in time.
            Exception: The first error of an update, after the actors have ended.
        """
        try:
            self._settle(Deadline.of_call(timeout, self._call_timeout_s))
        finally:
            self._end(timeout)

    # -- names of TorchRL's services ----------------------------------------------------------------------------------

    @property
    def service_backend(self) -> str:
        """Where the rows are: "ray", in actors."""
        return "ray"

    @property
    def transport_kind(self) -> str:
        """What carries rows and batches: "ray", the object store of Ray."""
        return "ray"

    @property
    def is_alive(self) -> bool:
        """Whether an actor answers."""
        try:
            return self._is_open()
        except NoAnswerError:
            return False

    def _is_open(self) -> bool:
        """Return whether the buffer was not closed; raise `NoAnswerError` if no actor answers."""
        try:
            return bool(self._call(_IS_ALIVE, None))
        except NoAnswerError:
            raise
        except LostBufferError:
            return False

    def start(self) -> Self:
        """Return the handle: the actors are started by the constructor.

        Raises:
            NoAnswerError: No actor answers.
            UsageError: The buffer was closed.
        """
        if not self._is_open():
            msg = f"A closed {type(self).__name__} cannot be restarted: make another one, {self._another}"
            raise UsageError(msg)
        return self

    def client(self) -> Self:
        """Return a handle that cannot end the buffer: its `close` and `shutdown` drop what that handle holds only.

        It may be pickled. It has its own batches requested ahead, and in a sharded buffer its own random seed.

        Raises:
            NoAnswerError: No actor answers.
            UsageError: The buffer was closed.
        """
        return self.clients(1)[0]

    def clients(self, num_clients: int) -> list[Self]:
        """Return handles for as many readers, each like that of `client()`.

        Raises:
            KindError: The number is not an integer.
            NoAnswerError: No actor answers.
            OptionError: It is below 1.
            UsageError: The buffer was closed.
        """
        number = positive("num_clients", num_clients)
        if not self._is_open():
            msg = f"{type(self).__name__} is closed: make another one, {self._another}"
            raise UsageError(msg)
        return [self._handle(client=True) for _ in range(number)]

    # -- rows ---------------------------------------------------------------------------------------------------------

    write_count = RemoteProperty[int](ReplayBuffer.write_count, reduce=sum)

    query = remote(
        ReplayBuffer.query,
        "work",
        'The predicate runs in the actors, and rows of shards follow one another: with `route="sticky"` a trajectory '
        "of one writer is in one shard, else each shard's part of it counts as a trajectory.",
        reduce=lambda parts: list(chain.from_iterable(parts)),
    )

    check = remote(ReplayBuffer.check)

    def __len__(self) -> int:
        """Rows present; in the shards that answer."""
        return int(self._call(_LEN, None))

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return len(self) > 0

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches without end.

        Raises:
            UsageError: The constructor got no `batch_size`.
        """
        self._check_iterable()
        while True:
            yield self.sample()

    def next(self) -> Any:
        """Return the next batch of an iteration, None at its end; the call after that begins another one.

        So does the call after an error. Not thread-safe.

        Raises:
            UsageError: The constructor got no `batch_size`.
        """
        iteration, self._iteration = self._iteration or iter(self), None
        batch = next(iteration, None)
        if batch is not None:
            self._iteration = iteration
        return batch

    def _check_iterable(self) -> None:
        """Raise `UsageError` if there is no batch size."""
        if self.batch_size is None:
            msg = "Cannot iterate over the replay buffer. Batch_size was not specified when it was made"
            raise UsageError(msg)

    # -- updates in a thread ------------------------------------------------------------------------------------------

    def _submit(self, deadline: Deadline, **given: Any) -> Future[Any]:
        return self._updates.submit(partial(self.update_if_present, **given, timeout_s=deadline), None)

    submit_update_if_present = remote(
        ReplayBuffer.submit_update_if_present,
        note="In a remote buffer draws do not wait for the update; `shutdown` and saves of this handle do.",
        via=_submit,
    )

    def _settle(self, deadline: Deadline) -> None:
        """Wait for updates that this handle submitted, and raise the first error of one of them."""
        if not self._updates.wait(deadline.left_s):
            raise deadline.error(self._silent(), "update_if_present")
        self._updates.settle()


_IS_ALIVE = Method("is_alive", reduce=any)
_LEN = Method("__len__", reduce=sum)
