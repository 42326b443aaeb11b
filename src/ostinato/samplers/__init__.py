"""Samplers: which rows come next. They see a `View` (counts and stamps), never data."""

from ostinato.samplers.base import Sampler
from ostinato.samplers.uniform import RandomSampler, SamplerWithoutReplacement

__all__ = ["RandomSampler", "Sampler", "SamplerWithoutReplacement"]
