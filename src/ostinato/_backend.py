"""The choice between the native extension and torch alone.

`backend.native` is the compiled module or None. The environment variable OSTINATO_NATIVE chooses at import: "0" is
torch alone, "1" requires the extension. `use_backend` chooses for a block of code. Other modules read `backend.native`
when a function runs or an object is made, never when they are imported.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Literal

__all__ = ["Backend", "backend", "load_native", "use_backend"]

_MISSING = (
    "ostinato runs without its native extension: the results are the same, but sample() and extend() of CPU "
    "storages are several times slower. To get it, install a wheel of ostinato for this platform, or a C++20 "
    "compiler and run `pip install --force-reinstall --no-cache-dir --no-deps ostinato`. OSTINATO_NATIVE=0 "
    "accepts the slower path and silences this warning."
)


def load_native(setting: str | None) -> ModuleType | None:
    """Load the native extension as the environment variable OSTINATO_NATIVE asks.

    Args:
        setting: Value of the variable: "0" for off, "1" for required, None (unset) for "if it is there".

    Returns:
        The module `ostinato._native`, or None: the caller then goes through torch.

    Raises:
        ImportError: `setting` is "1" and the native extension is missing or does not load.
        OptionError: `setting` is any other value.
    """
    if setting not in {None, "0", "1"}:
        message = (
            f"environment variable OSTINATO_NATIVE must be 0 (off), 1 (required) or unset, got {setting!r}: "
            "unset it to use the native extension where it is installed"
        )
        raise OptionError(message)
    if setting == "0":
        return None
    try:
        return importlib.import_module("ostinato._native")
    except ImportError as error:
        if setting == "1":
            message = (
                f"OSTINATO_NATIVE=1 requires the native extension of ostinato, which did not load ({error}): "
                "install a wheel, or a C++20 compiler and ostinato from source, or unset the variable"
            )
            raise ImportError(message) from error
        warnings.warn(_MISSING, RuntimeWarning, stacklevel=2)
        return None


def _open_exchange(native: ModuleType | None) -> bool:
    """Let the extension use torch's C exchange API; return False where there is none (before torch 2.10)."""
    import torch  # here, since `import ostinato` loads this module and does not load torch

    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if native is None or capsule is None:
        return False
    try:
        native.open_exchange(torch.Tensor, capsule)
    except ValueError:  # of a later major version of DLPack
        return False
    return True


class Backend:
    """What runs the loops over rows: the native extension, or torch alone.

    Attributes:
        native: The module `ostinato._native`, or None where torch alone is used. To be read only: see `use_backend`.
    """

    __slots__ = ("_exchange", "installed", "native", "switching")

    def __init__(self, native: ModuleType | None) -> None:
        self.installed = native
        self.native = native
        self.switching = threading.RLock()
        self._exchange: bool | None = None

    @property
    def exchange(self) -> bool:
        """Whether the extension reads and makes tensors through torch's C exchange API."""
        if self._exchange is None:
            self._exchange = _open_exchange(self.installed)
        return self._exchange


backend = Backend(load_native(os.environ.get("OSTINATO_NATIVE")))
"""The choice of this process."""


@contextmanager
def use_backend(name: Literal["native", "torch"]) -> Iterator[None]:
    """Use the native extension, or torch alone, inside a `with` block.

    The choice holds for all threads of the process, and for objects made inside the block as long as they live: a
    priority tree or an episode table keeps the code it was made with. Blocks may be nested. A block in another thread
    waits until this one has ended.

    Examples:
        ```python
        with use_backend("torch"):
            buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
        ```

    Args:
        name: "native" for the native extension, "torch" for torch alone.

    Raises:
        OptionError: `name` is another one, or is "native" where the native extension is not installed or switched off.
    """
    if name not in {"native", "torch"}:
        message = f"name must be 'native' or 'torch', got {name!r}"
        raise OptionError(message)
    if name == "native" and backend.installed is None:
        message = (
            "the native extension of ostinato is not installed, or OSTINATO_NATIVE=0 switched it off when ostinato was "
            "imported: use 'torch', or import ostinato with OSTINATO_NATIVE=1"
        )
        raise OptionError(message)
    with backend.switching:
        before = backend.native
        backend.native = backend.installed if name == "native" else None
        try:
            yield
        finally:
            backend.native = before
