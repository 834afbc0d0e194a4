"""Reads fixed-width records from memory-mapped files, for accelerate-core."""

from accelerate_records.factory import RecordsLoaderFactory
from accelerate_records.loader import RecordsLoader
from accelerate_records.records import Records, write_records
from accelerate_records.settings import RecordsSettings

__all__ = ["Records", "RecordsLoader", "RecordsLoaderFactory", "RecordsSettings", "write_records"]
__version__ = "0.1.0"
