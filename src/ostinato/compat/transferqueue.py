"""A storage backend of TransferQueue whose values are on disk: `backend.storage_backend=Ostinato`.

`docs/recipes/verl.md` shows it with TransferQueue and verl. Importing this module imports TransferQueue, and registers
the backend; each process that has a client of TransferQueue imports it.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ostinato._optional import require
from ostinato.durable.files import damaged
from ostinato.errors import KeyMissingError, OptionError
from ostinato.groups.log import frame, frames_of
from ostinato.groups.records import Payload, pack, payload_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
    from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
    from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory
else:
    _managers = require("transfer_queue.storage.managers.base")
    _clients = require("transfer_queue.storage.clients.base")
    KVStorageManager, StorageManagerFactory = _managers.KVStorageManager, _managers.StorageManagerFactory
    StorageKVClient, StorageClientFactory = _clients.StorageKVClient, _clients.StorageClientFactory
    StorageBootstrapProvider = require("transfer_queue.storage.bootstrap.provider").StorageBootstrapProvider

__all__ = ["StorageClient", "StorageManager", "register"]

NAME = "Ostinato"
"""Name of the backend in the configuration of TransferQueue."""
_FILE = "values.sqlite"
_BUSY_S = 60


@final
@StorageClientFactory.register(NAME)
class StorageClient(StorageKVClient):  # type: ignore[misc]
    """Values by key in an SQLite database, which processes of one machine share.

    A `put` is one transaction: when it has returned, its values are on the disk; if the process is killed before, none
    of them is there. Values are tensors and plain Python values, with checksums; nothing is pickled. Thread-safe.

    Args:
        config: `path`, the folder of the database, on a local disk; it is created.

    Raises:
        OptionError: There is no `path`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not config.get("path"):
            msg = f"backend.{NAME}.path must be the folder of the values, got {config.get('path')!r}"
            raise OptionError(msg)
        super().__init__(config)
        folder = Path(config["path"])
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        self._lock = threading.Lock()
        self._database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        for line in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL",
                     "CREATE TABLE IF NOT EXISTS data (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"):  # fmt: skip
            self._database.execute(line)

    def put(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Store values, in the place of those that the keys had.

        Raises:
            CheckpointError: A value has a type that cannot be saved; nothing is stored.
            sqlite3.OperationalError: The disk is full; nothing is stored.
        """
        rows = [(key, frame(0, pack({}, Payload.of(value, key)))) for key, value in zip(keys, values, strict=True)]
        self._write("INSERT OR REPLACE INTO data VALUES (?, ?)", rows)

    def get(self, keys: Sequence[str], **_: Any) -> list[Any]:
        """Return the values of keys, in their order. Copies; the other arguments of TransferQueue are not needed.

        Raises:
            KeyMissingError: A key has no value.
            DamagedFileError: A value is not as it was stored.
        """
        with self._lock:
            found = {
                key: self._database.execute("SELECT value FROM data WHERE key = ?", (key,)).fetchone() for key in keys
            }
        missing = [key for key, row in found.items() if row is None]
        if missing:
            msg = f"{self._path} has no values for {missing[:5]}: {len(missing)} of {len(keys)} keys are missing"
            raise KeyMissingError(msg)
        return [self._value(key, *found[key]) for key in keys]

    def _value(self, key: str, data: bytes) -> Any:
        body = next((body for _, _, body in frames_of(memoryview(data))), None)
        if body is None:
            damaged(self._path, "the checksum of a value does not match", key)
        return payload_of(bytearray(body), f"{self._path}: {key}")

    def clear(self, keys: Sequence[str], **_: Any) -> None:
        """Remove values; keys without one are ignored."""
        self._write("DELETE FROM data WHERE key = ?", [(key,) for key in keys])

    def _write(self, line: str, rows: list[tuple[Any, ...]]) -> None:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            with self._database:  # commits, or rolls back
                self._database.executemany(line, rows)

    def copy(self, folder: str, *, back: bool = False) -> None:
        """Copy all values to a folder, or back from it, in one transaction."""
        with self._lock, closing(sqlite3.connect(Path(folder) / _FILE)) as other:
            source, target = (other, self._database) if back else (self._database, other)
            source.backup(target)

    def close(self) -> None:
        """Close the database."""
        self._database.close()


@final
@StorageManagerFactory.register(NAME)
class StorageManager(KVStorageManager):  # type: ignore[misc]
    """The storage manager of the backend, which TransferQueue makes.

    Args:
        controller_info: Of the controller.
        config: See `StorageClient`.
        zmq_context: Not used, as by the other managers of values by key.
    """

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**config, "client_name": NAME}, zmq_context=zmq_context)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy all values to a folder, for `transfer_queue.save_checkpoint`."""
        self.storage_client.copy(checkpoint_dir)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Restore what `save_checkpoint` copied; values that were stored since are removed."""
        self.storage_client.copy(checkpoint_dir, back=True)


@StorageBootstrapProvider.register_provider(NAME)  # type: ignore[untyped-decorator]
def _bootstrap(conf: Any) -> dict[str, Any]:  # noqa: ARG001
    """Return no resources: there is no server to start."""
    return {}


def register() -> None:
    """Do nothing: this import is all that a process needs. For Ray's `worker_process_setup_hook`."""
