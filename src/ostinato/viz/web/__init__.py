"""The same scenes in a browser: a page, and the few answers that it asks for, served on this machine alone."""

from ostinato.viz.web.server import make_app, serve

__all__ = ["make_app", "serve"]
