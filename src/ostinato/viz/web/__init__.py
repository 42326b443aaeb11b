"""The viewer as a web page, served on the loopback interface."""

from ostinato.viz.web.server import make_app, serve

__all__ = ["make_app", "serve"]
