"""One small Ray cluster for all tests of a worker; the group keeps them on one worker."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "ray"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(GROUP))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        num_cpus=4,
        object_store_memory=150_000_000,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
