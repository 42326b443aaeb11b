"""Audit of any replay buffer: tagged rows go in, and what comes back wrong is reported.

```python
from ostinato import ReplayBuffer
from ostinato.testing.audit import audit


def test_my_buffer() -> None:
    audit(ReplayBuffer)
```

A buffer that has no adapter yet needs a subclass of `Adapter`; see docs/audit.md.
"""

from ostinato.testing.audit.adapter import Adapter
from ostinato.testing.audit.cases import Case, Sample, Step
from ostinato.testing.audit.examine import audit, examine
from ostinato.testing.audit.report import Finding, Report

__all__ = ["Adapter", "Case", "Finding", "Report", "Sample", "Step", "audit", "examine"]
