"""The page of `ostinato view --web`, served from a thread of a test."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ostinato.viz import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostinato.viz.sources import TrajectorySource


@contextmanager
def served(source: TrajectorySource, start: Position | None = None) -> Iterator[str]:
    """Serve trajectories, and yield the address; the test is skipped without the extra `web`."""
    pytest.importorskip("starlette", reason="the extra web is not installed")
    uvicorn = pytest.importorskip("uvicorn", reason="the extra web is not installed")
    from ostinato.viz.web import make_app

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(source, start or Position()), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
