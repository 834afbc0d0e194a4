"""Save models for other programs to load, and save and resume training runs.

Other checkpointers may use everything that is exported here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_checkpoint.background import Staging as Staging
    from accelerate_checkpoint.checkpointer import DirectoryCheckpointer as DirectoryCheckpointer
    from accelerate_checkpoint.files import FileEntry as FileEntry
    from accelerate_checkpoint.lease import hold_lease as hold_lease
    from accelerate_checkpoint.local_storage import LocalStorage as LocalStorage
    from accelerate_checkpoint.local_storage import is_url as is_url
    from accelerate_checkpoint.manifest import MANIFEST as MANIFEST
    from accelerate_checkpoint.manifest import Manifest as Manifest
    from accelerate_checkpoint.manifest import parse_manifest as parse_manifest
    from accelerate_checkpoint.manifest import read_manifest as read_manifest
    from accelerate_checkpoint.merging import merge_weights as merge_weights
    from accelerate_checkpoint.model import load_weights as load_weights
    from accelerate_checkpoint.model import save_object as save_object
    from accelerate_checkpoint.model import save_weights as save_weights
    from accelerate_checkpoint.preemption import Preempted as Preempted
    from accelerate_checkpoint.preemption import Preemption as Preemption
    from accelerate_checkpoint.preemption import read_signals as read_signals
    from accelerate_checkpoint.progress import byte_bar as byte_bar
    from accelerate_checkpoint.quantized_weights import as_plain_tensors as as_plain_tensors
    from accelerate_checkpoint.quantized_weights import first_scales as first_scales
    from accelerate_checkpoint.quantized_weights import restore_quantized as restore_quantized
    from accelerate_checkpoint.quantized_weights import scale_names as scale_names
    from accelerate_checkpoint.rng_state import capture_rng_state as capture_rng_state
    from accelerate_checkpoint.rng_state import restore_rng_state as restore_rng_state
    from accelerate_checkpoint.sharded_load import LoadedShards as LoadedShards
    from accelerate_checkpoint.sharded_load import load_shards as load_shards
    from accelerate_checkpoint.sharded_save import collective_device as collective_device
    from accelerate_checkpoint.sharded_save import run_together as run_together
    from accelerate_checkpoint.sharded_save import save_sharded as save_sharded
    from accelerate_checkpoint.sharded_save import writes_shard as writes_shard
    from accelerate_checkpoint.shards import ChecksumWriter as ChecksumWriter
    from accelerate_checkpoint.shards import SafeReader as SafeReader
    from accelerate_checkpoint.shards import load_shards_into as load_shards_into
    from accelerate_checkpoint.shards import read_metadata as read_metadata
    from accelerate_checkpoint.shards import shard_name_matcher as shard_name_matcher
    from accelerate_checkpoint.shards import with_names as with_names
    from accelerate_checkpoint.storage import Storage as Storage
    from accelerate_checkpoint.storage import is_save as is_save
    from accelerate_checkpoint.storage import join as join
    from accelerate_checkpoint.tensor_shards import TensorShard as TensorShard
    from accelerate_checkpoint.tensor_shards import TensorShardReader as TensorShardReader
    from accelerate_checkpoint.tensor_shards import TensorShardWriter as TensorShardWriter
    from accelerate_checkpoint.training_state import TrainingState as TrainingState
    from accelerate_checkpoint.weights import as_device as as_device
    from accelerate_checkpoint.weights import checkpoint_files as checkpoint_files
    from accelerate_checkpoint.weights import convert_file_size_to_int as convert_file_size_to_int
    from accelerate_checkpoint.weights import device_of as device_of
    from accelerate_checkpoint.weights import iter_state_dict as iter_state_dict

#: Module -> names exported from it. A module is imported on first use, so commands don't load torch.
_EXPORTS = {
    "accelerate_checkpoint.tensor_shards": (
        "TensorShard",
        "TensorShardReader",
        "TensorShardWriter",
    ),
    "accelerate_checkpoint.background": ("Staging",),
    "accelerate_checkpoint.checkpointer": ("DirectoryCheckpointer",),
    "accelerate_checkpoint.files": ("FileEntry",),
    "accelerate_checkpoint.lease": ("hold_lease",),
    "accelerate_checkpoint.local_storage": ("LocalStorage", "is_url"),
    "accelerate_checkpoint.manifest": ("MANIFEST", "Manifest", "parse_manifest", "read_manifest"),
    "accelerate_checkpoint.merging": ("merge_weights",),
    "accelerate_checkpoint.model": ("load_weights", "save_object", "save_weights"),
    "accelerate_checkpoint.preemption": ("Preempted", "Preemption", "read_signals"),
    "accelerate_checkpoint.progress": ("byte_bar",),
    "accelerate_checkpoint.quantized_weights": (
        "as_plain_tensors",
        "first_scales",
        "restore_quantized",
        "scale_names",
    ),
    "accelerate_checkpoint.rng_state": ("capture_rng_state", "restore_rng_state"),
    "accelerate_checkpoint.sharded_load": ("LoadedShards", "load_shards"),
    "accelerate_checkpoint.sharded_save": (
        "collective_device",
        "run_together",
        "save_sharded",
        "writes_shard",
    ),
    "accelerate_checkpoint.shards": (
        "ChecksumWriter",
        "SafeReader",
        "load_shards_into",
        "read_metadata",
        "shard_name_matcher",
        "with_names",
    ),
    "accelerate_checkpoint.storage": ("Storage", "is_save", "join"),
    "accelerate_checkpoint.training_state": ("TrainingState",),
    "accelerate_checkpoint.weights": (
        "as_device",
        "checkpoint_files",
        "convert_file_size_to_int",
        "device_of",
        "iter_state_dict",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [*sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
