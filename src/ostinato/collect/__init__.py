"""From simulators to buffers: what vector environments return becomes rows."""

from ostinato.collect.steps import VectorSteps

__all__ = ["VectorSteps"]
