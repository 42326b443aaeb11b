"""Tools that inspect, verify, convert, merge, split and compact saved data. They return reports and print nothing."""

from ostinato.datasets.examination import Finding
from ostinato.tools.compact import CompactReport, compact
from ostinato.tools.convert import ConvertReport, convert
from ostinato.tools.datasets import DatasetReport, DatasetSample, inspect_dataset, sample_dataset
from ostinato.tools.doctor import Report, examine
from ostinato.tools.groups import GroupReport, GroupsReport, LeaseReport, inspect_groups
from ostinato.tools.inspect import (
    ChainReport,
    CheckpointReport,
    FieldReport,
    KeyReport,
    LinkReport,
    PriorityReport,
    SampleReport,
    StoreReport,
    inspect_checkpoint,
    inspect_store,
    is_store,
    kind_of,
    sample_store,
)
from ostinato.tools.merge_split import MoveReport, merge, split
from ostinato.tools.verify import Damage, VerifyReport, verify

__all__ = [
    "ChainReport",
    "CheckpointReport",
    "CompactReport",
    "ConvertReport",
    "Damage",
    "DatasetReport",
    "DatasetSample",
    "FieldReport",
    "Finding",
    "GroupReport",
    "GroupsReport",
    "KeyReport",
    "LeaseReport",
    "LinkReport",
    "MoveReport",
    "PriorityReport",
    "Report",
    "SampleReport",
    "StoreReport",
    "VerifyReport",
    "compact",
    "convert",
    "examine",
    "inspect_checkpoint",
    "inspect_dataset",
    "inspect_groups",
    "inspect_store",
    "is_store",
    "kind_of",
    "merge",
    "sample_dataset",
    "sample_store",
    "split",
    "verify",
]
