"""Rows from files, validated before anything expensive starts, and batches that a checkpoint can resume."""

from etude.data.dataset import RLDataset
from etude.data.files import located_rows, read_rows, write_parquet
from etude.data.loader import ResumableLoader
from etude.data.rlhf import RLHFDataset
from etude.data.rows import active_tools, check_row
from etude.data.sft import SFTDataset
from etude.options import DataOptions

__all__ = [
    "DataOptions",
    "RLDataset",
    "RLHFDataset",
    "ResumableLoader",
    "SFTDataset",
    "active_tools",
    "check_row",
    "located_rows",
    "read_rows",
    "write_parquet",
]
