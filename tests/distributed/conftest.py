"""One small Ray cluster for all tests that need one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")
    ray.init(
        address="local",  # a new one, even if another cluster is running
        num_cpus=4,
        object_store_memory=150_000_000,
        include_dashboard=False,
        logging_level=40,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
