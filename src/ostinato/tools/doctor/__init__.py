"""The doctor: looks for faults in datasets."""

from ostinato.tools.doctor.examine import examine
from ostinato.tools.doctor.report import Finding, Report

__all__ = ["Finding", "Report", "examine"]
