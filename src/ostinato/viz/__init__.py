"""Pictures: scenes say what to show as plain data; screens draw it: matplotlib, a prompt, a browser, Rerun."""

from ostinato.viz.folder import TrajectoryFolder
from ostinato.viz.moment import Moment, moment
from ostinato.viz.saved import SavedBuffer
from ostinato.viz.scene import Bars, Curves, Layer, Level, Line, Mark, Points, Scene, Shares, Stack
from ostinato.viz.screen import draw
from ostinato.viz.walk import Spot, Walk

__all__ = [
    "Bars",
    "Curves",
    "Layer",
    "Level",
    "Line",
    "Mark",
    "Moment",
    "Points",
    "SavedBuffer",
    "Scene",
    "Shares",
    "Spot",
    "Stack",
    "TrajectoryFolder",
    "Walk",
    "draw",
    "moment",
]
