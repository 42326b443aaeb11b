"""Samplers draw the rows of a batch, from a `View` of the buffer: counts, generations and episodes."""

from ostinato.samplers.base import CountingSampler, PrioritySampler, Sampler
from ostinato.samplers.by_field import PromptGroupSampler, StalenessAwareSampler
from ostinato.samplers.consuming import ConsumingSampler, LimitedSampler, QueueSampler
from ostinato.samplers.ensemble import SamplerEnsemble
from ostinato.samplers.prioritized import PrioritizedSampler
from ostinato.samplers.ranked import HeapSampler, StackSampler
from ostinato.samplers.slices import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
)
from ostinato.samplers.uniform import RandomSampler, SamplerWithoutReplacement

__all__ = [
    "ConsumingSampler",
    "CountingSampler",
    "HeapSampler",
    "LimitedSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PrioritySampler",
    "PromptGroupSampler",
    "QueueSampler",
    "RandomSampler",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StackSampler",
    "StalenessAwareSampler",
    "StreamingSliceSampler",
]
