"""Durable files: atomic replacement, checksums, and checkpoints of arrays and JSON state."""

from ostinato.durable.arrays import (
    ArrayRecord,
    open_mapped,
    read_array,
    read_arrays,
    verify_array,
)
from ostinato.durable.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    SavedColumn,
    load_part,
    save_part,
    write_array,
)
from ostinato.durable.files import atomic_write, check_free, fsync_dir, reserve, safe_join
from ostinato.durable.manifest import FORMAT_VERSION, decode, encode, read_manifest, write_manifest

__all__ = [
    "FORMAT_VERSION",
    "ArrayRecord",
    "CheckpointReader",
    "CheckpointWriter",
    "SavedColumn",
    "atomic_write",
    "check_free",
    "decode",
    "encode",
    "fsync_dir",
    "load_part",
    "open_mapped",
    "read_array",
    "read_arrays",
    "read_manifest",
    "reserve",
    "safe_join",
    "save_part",
    "verify_array",
    "write_array",
    "write_manifest",
]
