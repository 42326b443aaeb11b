"""Hypothesis profiles: `quick` by default; `pytest --hypothesis-profile=slow` searches far longer.

Nothing heavy is imported here: the native tests run where torch is missing.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_UNTIMED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

settings.register_profile(
    "quick", derandomize=True, deadline=None, max_examples=40, stateful_step_count=16, suppress_health_check=_UNTIMED
)
settings.register_profile(
    "slow", deadline=None, max_examples=1000, stateful_step_count=50, suppress_health_check=_UNTIMED
)
settings.load_profile("quick")
