"""Durable files: atomic replacement, checksums, and checkpoints of arrays and JSON state."""

from ostinato.durable.arrays import (
    ArrayRecord,
    open_mapped,
    read_array,
    read_array_into,
    read_stream,
    verify_array,
)
from ostinato.durable.blocks import BLOCK_BYTES
from ostinato.durable.checkpoint_reader import CheckpointReader
from ostinato.durable.checkpoint_writer import CheckpointWriter
from ostinato.durable.files import atomic_write, check_free, free_bytes, fsync_dir, reserve, safe_join
from ostinato.durable.json_codec import decode, encode
from ostinato.durable.manifest import FORMAT_VERSION, Manifest, read_manifest, write_manifest
from ostinato.durable.row_files import write_array, write_stream

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "ArrayRecord",
    "CheckpointReader",
    "CheckpointWriter",
    "Manifest",
    "atomic_write",
    "check_free",
    "decode",
    "encode",
    "free_bytes",
    "fsync_dir",
    "open_mapped",
    "read_array",
    "read_array_into",
    "read_manifest",
    "read_stream",
    "reserve",
    "safe_join",
    "verify_array",
    "write_array",
    "write_manifest",
    "write_stream",
]
