"""Transforms of sampled batches, and of rows before they are stored."""

from ostinato.transforms.transforms import Cast, Compose, Exclude, Rename, RewardScale, Select, ToDevice

__all__ = ["Cast", "Compose", "Exclude", "Rename", "RewardScale", "Select", "ToDevice"]
