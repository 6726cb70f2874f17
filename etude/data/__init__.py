"""Datasets: rows from files, validated before anything expensive starts, and batches that a checkpoint can resume."""

from etude.data.dataset import RLDataset
from etude.data.files import located_rows, read_rows, write_parquet
from etude.data.loader import ResumableLoader
from etude.data.rows import active_tools, check_row
from etude.data.samplers import SAMPLERS, Sampler, open_sampler, row_success
from etude.data.sft import SFTDataset
from etude.data.verl_dataset import RLHFDataset, custom_rows
from etude.options import DataOptions

__all__ = [
    "SAMPLERS",
    "DataOptions",
    "RLDataset",
    "RLHFDataset",
    "ResumableLoader",
    "SFTDataset",
    "Sampler",
    "active_tools",
    "check_row",
    "custom_rows",
    "located_rows",
    "open_sampler",
    "read_rows",
    "row_success",
    "write_parquet",
]
