"""Datasets as read-only storages: robot and offline datasets are opened and sampled without being converted."""

from ostinato.datasets.checks import READ_ERRORS, Faults, FirstFault, Place
from ostinato.datasets.columns import BlockColumn, TensorColumn
from ostinato.datasets.dataset import Contents, DatasetStorage
from ostinato.datasets.examination import Examination
from ostinato.datasets.format import Format, Reading, Writing
from ostinato.datasets.open import open_dataset

__all__ = [
    "READ_ERRORS",
    "BlockColumn",
    "Contents",
    "DatasetStorage",
    "Examination",
    "Faults",
    "FirstFault",
    "Format",
    "Place",
    "Reading",
    "TensorColumn",
    "Writing",
    "open_dataset",
]
