"""Visualization: trajectories step by step, and figures of the contents of a buffer."""

from ostinato.viz.episodes import SavedBuffer
from ostinato.viz.figures import Bars, Curves, FigureSpec, Film, Layer, Level, Line, Mark, Points, Shares, Stack, draw
from ostinato.viz.frames import Frame, Navigator, Position, read_frame
from ostinato.viz.sources import TrajectoryFolder

__all__ = [
    "Bars",
    "Curves",
    "FigureSpec",
    "Film",
    "Frame",
    "Layer",
    "Level",
    "Line",
    "Mark",
    "Navigator",
    "Points",
    "Position",
    "SavedBuffer",
    "Shares",
    "Stack",
    "TrajectoryFolder",
    "draw",
    "read_frame",
]
