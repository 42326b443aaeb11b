"""The types that samplers, writers, storages and units of your own receive and return.

The base classes are `ostinato.Sampler`, `ostinato.Writer`, `ostinato.Storage` and `ostinato.SampleUnit`.
"""

from ostinato.core.index import Selection, select
from ostinato.core.records import Column, Draw, Picks, Placement, Plan, Request, Run, View
from ostinato.core.ring import Ring

__all__ = ["Column", "Draw", "Picks", "Placement", "Plan", "Request", "Ring", "Run", "Selection", "View", "select"]
