"""`for_collector`: any buffer as the `replay_buffer` of TorchRL's collectors, with the rows of all worker processes."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import current_process
from typing import TYPE_CHECKING, Any, Self, final

from ostinato.errors import KindError, LostBufferError, OptionError, UsageError

if TYPE_CHECKING:
    from ostinato.buffers import ReplayBuffer

__all__ = ["CollectorBuffer", "for_collector"]


def for_collector(rb: ReplayBuffer) -> CollectorBuffer:
    """Return `replay_buffer` for a collector of TorchRL: rows of its worker processes are written to `rb` here.

    `Collector` takes any buffer of Ostinato as it is, and multi-process collectors take buffers that processes share
    (see `ReplayBuffer.share`); they need no adapter. This one is for all others: prioritized and slice samplers, units,
    lists, `ndim=2`, rows on a GPU, a `rate_limiter`.

    Args:
        rb: the buffer. Sample from it as usual, in this process, also while the collector runs.

    Returns:
        A handle with the methods that collectors call. Close it (`close()`, or a `with` block) after the collector.

    Raises:
        KindError: if `rb` cannot be written to.
        OptionError: if processes share `rb`: pass it to the collector as it is.
    """
    return CollectorBuffer(rb)


@final
class CollectorBuffer:
    """What a collector calls on its `replay_buffer`, in the process of the buffer and in those of its workers.

    In another process each call is sent to the process of the buffer through a local socket, and returns when it has
    been answered there: rows that `extend` returned for were written exactly once. Rows of a worker that is killed
    while it sends them are dropped. Errors are raised in the worker that called. Workers authenticate with the key
    that Python gives to the processes of one program (`multiprocessing.current_process().authkey`).

    Thread-safe. Cost of a call from a worker: two pickles and two copies of the rows.
    """

    shared = True
    """Collectors call `share()` where this is false."""
    _storage = None
    """Collectors read `_storage.initialized`, and do without where there is none."""

    def __init__(self, rb: ReplayBuffer) -> None:
        for name in ("extend", "add", "empty"):
            if not callable(getattr(rb, name, None)):
                msg = f"a collector needs a buffer with the methods extend, add and empty, got {type(rb).__name__}"
                raise KindError(msg)
        if rb.shared:
            msg = "processes share this buffer, and collectors take it as it is: pass it as replay_buffer"
            raise OptionError(msg)
        self._server: _Server | None = _Server(rb)
        self._address: Any = self._server.address
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Go to a process that is being started.

        Raises:
            UsageError: at any other time.
        """
        if get_spawning_popen() is None:
            msg = "this handle goes to processes that are being started, such as the workers of a collector"
            raise UsageError(msg)
        return {"_address": self._address, "_server": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect at the first call."""
        self.__dict__.update(state)
        self._begin()

    def extend(self, data: Any) -> Any:
        """Write rows; see `ReplayBuffer.extend`."""
        return self._call("extend", data)

    def add(self, data: Any) -> Any:
        """Write one row; see `ReplayBuffer.add`."""
        return self._call("add", data)

    def empty(self) -> None:
        """Remove all rows."""
        self._call("empty")

    @property
    def write_count(self) -> int:
        """Rows written since the buffer was made or emptied."""
        return int(self._call("write_count"))

    def __len__(self) -> int:
        """Rows present."""
        return int(self._call("__len__"))

    def share(self) -> Self:
        """Return this handle: it serves all processes."""
        return self

    def close(self) -> None:
        """End the connections; the buffer stays. Idempotent."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._server is not None and self._server.process == os.getpid():
                self._server.close()

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the handle; see `close`."""
        self.close()

    def __del__(self) -> None:
        """Close the handle."""
        if hasattr(self, "_lock"):
            self.close()

    def _call(self, name: str, *given: Any) -> Any:
        """Call a method of the buffer, or read an attribute, where the buffer is."""
        if self._server is not None and self._server.process == os.getpid():
            return _answer(self._server.rb, name, given)
        if self._process != os.getpid():  # a forked child: the connection and the lock are those of its parent
            self._begin()
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = Client(self._address, authkey=current_process().authkey)
                _send(self._connection, (name, *(_dense(value) for value in given)))
                failed, answer = _receive(self._connection)
            except (EOFError, OSError) as error:
                self._connection = None
                msg = "the process of the buffer has closed the handle or is gone: rows of this call may be lost"
                raise LostBufferError(msg) from error
        if failed:
            raise answer
        return answer


def _answer(rb: Any, name: str, given: tuple[Any, ...]) -> Any:
    found = getattr(rb, name)
    return found(*given) if callable(found) else found


def _send(connection: Connection, data: Any) -> None:
    """Send the bytes of the tensors themselves.

    `Connection.send` would send file descriptors of shared memory, which a thread of this process keeps open for a
    receiver that was killed.
    """
    connection.send_bytes(pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())  # noqa: S301 (of a process that has the key of this program)


def _dense(data: Any) -> Any:
    """Return rows as they are sent: a lazy stack as one TensorDict."""
    return data.contiguous() if hasattr(data, "contiguous") else data


@final
class _Server:
    """Answers the calls of workers, each in a thread, where the buffer is."""

    _CALLS = frozenset({"extend", "add", "empty", "write_count", "__len__"})

    def __init__(self, rb: Any) -> None:
        self.rb = rb
        self.process = os.getpid()
        self._listener = Listener(authkey=current_process().authkey, backlog=64)
        self.address = self._listener.address
        self._closed = threading.Event()
        threading.Thread(target=_accept, args=(self,), name="ostinato-collector", daemon=True).start()

    def accept(self) -> bool:
        """Wait for a worker, and answer it in a thread; return False once closed."""
        try:
            connection = self._listener.accept()
        except OSError:
            return not self._closed.is_set()
        except Exception:  # noqa: BLE001 (a stranger without the key)
            return True
        if self._closed.is_set():
            connection.close()
            return False
        threading.Thread(target=self._serve, args=(connection,), name="ostinato-collector", daemon=True).start()
        return True

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                name, *given = _receive(connection)
                try:
                    if self._closed.is_set():
                        msg = "the handle is closed: close it after the collector"
                        raise LostBufferError(msg)
                    if name not in self._CALLS:
                        msg = f"workers cannot call {name!r}"
                        raise UsageError(msg)
                    answer = False, _answer(self.rb, name, tuple(given))
                except Exception as error:  # noqa: BLE001 (it is the worker's)
                    answer = True, error
                _send(connection, answer)
        except (EOFError, OSError):
            connection.close()  # the worker has ended, or was killed

    def close(self) -> None:
        """Answer no more calls; those that are being answered end, and threads end with their workers."""
        if self._closed.is_set():
            return
        self._closed.set()
        with suppress(OSError, EOFError):
            Client(self.address, authkey=current_process().authkey).close()  # wakes the thread that accepts
        self._listener.close()


def _accept(server: _Server) -> None:
    while server.accept():
        pass
