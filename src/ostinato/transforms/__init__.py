"""Transforms: what happens to a finished batch when it is sampled, and to rows before they are stored."""

from ostinato.transforms.transforms import Cast, Compose, Exclude, Rename, RewardScale, Select, ToDevice

__all__ = ["Cast", "Compose", "Exclude", "Rename", "RewardScale", "Select", "ToDevice"]
