"""The web server of the viewer. Listens on the loopback interface and accepts requests for local host names only."""

from __future__ import annotations

import base64
import io
import math
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ostinato._optional import require
from ostinato.errors import OptionError
from ostinato.viz.figures import LINES
from ostinato.viz.frames import ALL_CAMERAS, Navigator, Position, read_frame, read_timeline
from ostinato.viz.sources import id_range, parse_number

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from ostinato.viz.frames import ObservationView, Traces
    from ostinato.viz.sources import TrajectorySource

__all__ = ["make_app", "serve"]

_HOST = "127.0.0.1"
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_READ_S = 0.2
"""Time in which returns are read for one request."""
_PARAMETERS = (*Position._fields, "first")


@final
class _Api:
    """The JSON responses to the requests of the page."""

    def __init__(self, source: TrajectorySource, start: Position) -> None:
        self._source, self._start = source, start
        self._returns: dict[int, float | None] = {}

    def source(self, _: dict[str, int]) -> dict[str, Any]:
        """Return all trajectories: ids, steps, environments."""
        extents = [self._source.extent(index) for index in range(len(self._source.ids))]
        return {
            "title": self._source.title,
            "history": self._source.history,
            "unit": self._source.unit,
            "span": id_range(self._source),
            "colours": LINES,
            "ids": self._source.ids,
            "steps": [steps for steps, _ in extents],
            "envs": [envs for _, envs in extents],
            "start": self._start,
        }

    def returns(self, given: dict[str, int]) -> dict[str, Any]:
        """Return the returns from the position `first` on: as many as can be read in a short time, but at least one."""
        first, until = given.get("first", 0), time.monotonic() + _READ_S
        values: list[float | None] = []
        for index in range(first, len(self._source.ids)):
            if index not in self._returns:
                value = self._source.returns(index)
                self._returns[index] = value if value is not None and math.isfinite(value) else None
            values.append(self._returns[index])
            if time.monotonic() > until:
                break
        return {"first": first, "values": values}

    def frame(self, given: dict[str, int]) -> dict[str, Any]:
        """Return one step: facts, and the images of all cameras."""
        position = self._position(given)
        seen = read_frame(self._source, position, ALL_CAMERAS)
        return {
            "trajectory": position.trajectory,
            "step": seen.step,
            "steps": seen.steps,
            "env": seen.env,
            "envs": seen.envs,
            "title": seen.title,
            "facts": seen.facts,
            "problem": seen.problem,
            "observations": [_pictures(seen.current), _pictures(seen.following)],
        }

    def timeline(self, given: dict[str, int]) -> dict[str, Any]:
        """Return reward, ends, action and vectors of one trajectory over all steps."""
        position = self._position(given)
        seen = read_frame(self._source, position._replace(step=0), ALL_CAMERAS)
        timeline = None if seen.problem else read_timeline(self._source.open(position.trajectory), position.env)
        if timeline is None:
            return {"reward": None, "ends": [], "action": None, "observations": [[], []]}
        return {
            "reward": None if timeline.reward is None else _traces(timeline.reward),
            "ends": timeline.ends.tolist(),
            "action": None if timeline.action is None else _traces(timeline.action),
            "observations": [[_traces(item) for item in view.traces] for view in (seen.current, seen.following)],
        }

    def _position(self, given: dict[str, int]) -> Position:
        """Return the requested position, clipped to the positions that exist."""
        wanted = Position(*(given.get(name, 0) for name in Position._fields))
        return Navigator(self._source, wanted).position


def _pictures(view: ObservationView) -> dict[str, Any]:
    shown = [{"camera": item.camera, "source": _data_url(item.pixels)} for item in view.pictures]
    vectors = [traces.name for traces in view.traces]
    return {"title": view.title, "note": view.note, "pictures": shown, "vectors": vectors}


def _data_url(pixels: np.ndarray) -> str:
    """Return an image as a `data:` URL."""
    memory = io.BytesIO()
    require("PIL.Image", "web").fromarray(pixels).save(memory, format="png", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode()


def _traces(traces: Traces) -> dict[str, Any]:
    lines = [_plain(line) for line in traces.values.T]
    return {"name": traces.name, "at": traces.steps.tolist(), "lines": lines, "components": traces.components}


def _plain(values: np.ndarray) -> list[float | None]:
    """Return JSON numbers, rounded to the resolution of the screen; None if not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def make_app(source: TrajectorySource, start: Position) -> Any:
    """Return the ASGI application.

    Args:
        source: The trajectories.
        start: The position that the page shows first.

    Raises:
        MissingExtraError: The extra `web` is not installed.
    """
    applications, middleware, hosts, responses, routing = (
        require(f"starlette.{name}", "web")
        for name in ("applications", "middleware", "middleware.trustedhost", "responses", "routing")
    )
    require("PIL.Image", "web")
    api = _Api(source, start)

    def endpoint_of(answer: Callable[[dict[str, int]], Any]) -> Callable[[Any], Any]:
        def endpoint(request: Any) -> Any:
            try:
                given = _numbers(request.query_params)
            except OptionError as error:
                return responses.JSONResponse({"error": str(error)}, 400, headers=_HEADERS)
            return responses.JSONResponse(answer(given), headers=_HEADERS)

        return endpoint

    def file(path: Path, kind: str) -> Callable[[Any], Any]:
        return lambda _: responses.FileResponse(path, media_type=kind, headers=_HEADERS)

    here = Path(__file__).parent
    routes = [routing.Route(url, file(here / name, kind)) for url, (name, kind) in _FILES.items()]
    routes += [
        routing.Route(f"/api/{name}", endpoint_of(getattr(api, name)))
        for name in ("source", "returns", "frame", "timeline")
    ]
    trusted = middleware.Middleware(hosts.TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
    return applications.Starlette(routes=routes, middleware=[trusted])


def _numbers(given: Any) -> dict[str, int]:
    numbers = {}
    for name, text in given.items():
        number = parse_number(text)
        if number is None or name not in _PARAMETERS:
            msg = f"parameters are {', '.join(_PARAMETERS)}, each a non-negative integer, got {name[:20]}={text[:20]!r}"
            raise OptionError(msg)
        numbers[name] = number
    return numbers


def serve(source: TrajectorySource, start: Position, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted.

    Args:
        source: The trajectories.
        start: The position that the page shows first.
        port: Port on the loopback interface; 0 selects a free port.
        say: Called with the URL.

    Raises:
        OptionError: The port cannot be opened.
    """
    uvicorn = require("uvicorn", "web")
    app = make_app(source, start)
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as error:
        msg = f"port {port} cannot be opened ({error.strerror}): give another --port, or leave it out to use a free one"
        raise OptionError(msg) from error
    with listener:
        say(f"http://{_HOST}:{listener.getsockname()[1]}/ (press Ctrl-C to stop)")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return
