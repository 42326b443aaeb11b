"""Transforms: what happens to a finished batch when it is sampled, and to rows before they are stored."""

from ostinato.transforms.basic import Cast, Exclude, Rename, RewardScale, Select, ToDevice
from ostinato.transforms.compose import Compose

__all__ = ["Cast", "Compose", "Exclude", "Rename", "RewardScale", "Select", "ToDevice"]
