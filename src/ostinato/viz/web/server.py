"""Serves the page and its answers. Listens on the loopback interface only, and answers no other host's name."""

from __future__ import annotations

import base64
import io
import math
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ostinato._optional import require
from ostinato.errors import OptionError
from ostinato.viz.moment import ALL_CAMERAS, moment, strip_of
from ostinato.viz.reel import number_in, span
from ostinato.viz.screen import LINES
from ostinato.viz.walk import Spot

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from ostinato.viz.moment import Side, Traces
    from ostinato.viz.reel import Reels

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
_PAUSE_S = 0.1
_ASKED = ("reel", "step", "env", "first")


@final
class _Returns:
    """Reads the return of every trajectory in the background, while nobody asks for pictures."""

    def __init__(self, reels: Reels) -> None:
        self._reels = reels
        self.values: list[float | None] = []
        self._quiet_from = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="ostinato-returns", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Pause for a moment: somebody wants a picture."""
        self._quiet_from = time.monotonic() + _PAUSE_S

    def _read(self) -> None:
        for index in range(len(self._reels.ids)):
            while time.monotonic() < self._quiet_from:
                time.sleep(_PAUSE_S / 4)
            value = self._reels.returns(index)
            self.values.append(value if value is not None and math.isfinite(value) else None)


@final
class _Answers:
    """What the page asks for, as plain values."""

    def __init__(self, reels: Reels, start: Spot) -> None:
        self._reels, self._start = reels, start
        self._returns = _Returns(reels)

    def place(self, _: dict[str, int]) -> dict[str, Any]:
        """All trajectories: ids, steps, environments."""
        extents = [self._reels.extent(index) for index in range(len(self._reels.ids))]
        return {
            "title": self._reels.title,
            "history": self._reels.history,
            "unit": self._reels.unit,
            "span": span(self._reels),
            "colours": LINES,
            "ids": self._reels.ids,
            "steps": [steps for steps, _ in extents],
            "envs": [envs for _, envs in extents],
            "start": self._start,
        }

    def returns(self, given: dict[str, int]) -> dict[str, Any]:
        """Returns read so far, from a position on."""
        self._returns.start()
        first = given.get("first", 0)
        return {"first": first, "values": self._returns.values[first:]}

    def moment(self, given: dict[str, int]) -> dict[str, Any]:
        """One step: facts, and the pictures of all cameras."""
        self._returns.wait()
        spot = self._spot(given)
        seen = moment(self._reels, spot, ALL_CAMERAS)
        return {
            "reel": spot.reel,
            "step": seen.step,
            "steps": seen.steps,
            "env": seen.env,
            "envs": seen.envs,
            "title": seen.title,
            "facts": seen.facts,
            "problem": seen.problem,
            "sides": [_pictures(seen.current), _pictures(seen.following)],
        }

    def strip(self, given: dict[str, int]) -> dict[str, Any]:
        """One trajectory: reward, ends and action of every step, and vectors where there are no pictures."""
        spot = self._spot(given)
        seen = moment(self._reels, spot._replace(step=0), ALL_CAMERAS)
        strip = None if seen.problem else strip_of(self._reels.open(spot.reel), spot.env)
        if strip is None:
            return {"reward": None, "ends": [], "action": None, "sides": [[], []]}
        return {
            "reward": None if strip.reward is None else _traces(strip.reward),
            "ends": strip.ends.tolist(),
            "action": None if strip.action is None else _traces(strip.action),
            "sides": [[_traces(item) for item in side.traces] for side in (seen.current, seen.following)],
        }

    def _spot(self, given: dict[str, int]) -> Spot:
        """Return a place that exists: what is too large becomes the last one."""
        index = min(given.get("reel", 0), len(self._reels.ids) - 1)
        reel = self._reels.open(index)
        return Spot(index, min(given.get("step", 0), reel.steps - 1), min(given.get("env", 0), reel.envs - 1))


def _pictures(side: Side) -> dict[str, Any]:
    shown = [{"camera": item.camera, "source": _source(item.pixels)} for item in side.pictures]
    vectors = [traces.name for traces in side.traces]
    return {"title": side.title, "note": side.note, "pictures": shown, "vectors": vectors}


def _source(pixels: np.ndarray) -> str:
    """Return a picture as an address that holds it."""
    memory = io.BytesIO()
    require("PIL.Image", "web").fromarray(pixels).save(memory, format="png", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode()


def _traces(traces: Traces) -> dict[str, Any]:
    lines = [_plain(line) for line in traces.values.T]
    return {"name": traces.name, "at": traces.steps.tolist(), "lines": lines, "components": traces.components}


def _plain(values: np.ndarray) -> list[float | None]:
    """Return numbers that JSON has words for, rounded to what a line of pixels can show."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def make_app(reels: Reels, start: Spot) -> Any:
    """Return the ASGI application.

    Args:
        reels: The trajectories.
        start: Where the page begins.

    Raises:
        MissingExtraError: The extra `web` is not installed.
    """
    applications, middleware, hosts, responses, routing = (
        require(f"starlette.{name}", "web")
        for name in ("applications", "middleware", "middleware.trustedhost", "responses", "routing")
    )
    require("PIL.Image", "web")
    answers = _Answers(reels, start)

    def asked(answer: Callable[[dict[str, int]], Any]) -> Callable[[Any], Any]:
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
        routing.Route(f"/api/{name}", asked(getattr(answers, name))) for name in ("place", "returns", "moment", "strip")
    ]
    trusted = middleware.Middleware(hosts.TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
    return applications.Starlette(routes=routes, middleware=[trusted])


def _numbers(given: Any) -> dict[str, int]:
    numbers = {}
    for name, text in given.items():
        number = number_in(text)
        if number is None or name not in _ASKED:
            msg = f"a question has {', '.join(_ASKED)}, each a number of 0 or more, got {name[:20]}={text[:20]!r}"
            raise OptionError(msg)
        numbers[name] = number
    return numbers


def serve(reels: Reels, start: Spot, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted.

    Args:
        reels: The trajectories.
        start: Where the page begins.
        port: Port on the loopback interface; 0 takes a free one.
        say: Called with the address.

    Raises:
        OptionError: The port cannot be opened.
    """
    uvicorn = require("uvicorn", "web")
    app = make_app(reels, start)
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as error:
        msg = f"port {port} cannot be opened ({error.strerror}): give another --port, or none to take a free one"
        raise OptionError(msg) from error
    with listener:
        say(f"http://{_HOST}:{listener.getsockname()[1]}/ (end it with Ctrl-C)")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return
