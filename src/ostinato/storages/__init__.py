"""Storages: how rows are kept, in a list, in tensors, or in mapped files. They know no sampler and no writer."""

from ostinato.storages.base import Storage
from ostinato.storages.columns import StorageColumn
from ostinato.storages.ensemble import StorageEnsemble
from ostinato.storages.lazy import LazyMemmapStorage, LazyTensorStorage
from ostinato.storages.list import CompressedListStorage, LazyStackStorage, ListStorage
from ostinato.storages.ragged import RaggedTensorStorage
from ostinato.storages.tensor import TensorStorage

__all__ = [
    "CompressedListStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "RaggedTensorStorage",
    "Storage",
    "StorageColumn",
    "StorageEnsemble",
    "TensorStorage",
]
