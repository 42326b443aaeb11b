"""Contract tests for storages, samplers, writers, units and buffers: subclass one, implement `make`, run pytest.

```python
from ostinato import Storage
from ostinato.testing import StorageContract


class TestMyStorage(StorageContract):
    def make(self, capacity: int) -> Storage:
        return MyStorage(capacity)
```

Each test method states one requirement in its docstring. The tests need no plugin and no fixture.
"""

from ostinato._backend import use_backend
from ostinato.testing.buffers import BufferContract, ResumeContract
from ostinato.testing.options import OptionContract
from ostinato.testing.samplers import SamplerContract
from ostinato.testing.storages import StorageContract
from ostinato.testing.units import UnitContract
from ostinato.testing.views import make_view
from ostinato.testing.writers import WriterContract

__all__ = [
    "BufferContract",
    "OptionContract",
    "ResumeContract",
    "SamplerContract",
    "StorageContract",
    "UnitContract",
    "WriterContract",
    "make_view",
    "use_backend",
]
