"""From simulators to buffers: what vector environments return becomes rows."""

from ostinato.collect.vector_env import VectorEnvRecorder

__all__ = ["VectorEnvRecorder"]
