"""Datasets as read-only storages: robot and offline datasets are opened and sampled without being converted."""

from ostinato.datasets.dataset import DatasetStorage
from ostinato.datasets.open import open_dataset

__all__ = ["DatasetStorage", "open_dataset"]
