"""Collection from simulators: steps of vector environments as rows of a buffer."""

from ostinato.collect.vector_env import VectorEnvRecorder

__all__ = ["VectorEnvRecorder"]
