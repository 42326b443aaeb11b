"""Pictures: `scene` says what to show as plain data, `screen` draws it with matplotlib, headless."""

from ostinato.viz.scene import Bars, Curves, Layer, Level, Line, Mark, Points, Scene, Stack
from ostinato.viz.screen import draw

__all__ = ["Bars", "Curves", "Layer", "Level", "Line", "Mark", "Points", "Scene", "Stack", "draw"]
