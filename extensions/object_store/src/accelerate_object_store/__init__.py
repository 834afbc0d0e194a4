"""Checkpoints in S3, Google Cloud Storage and Azure."""

from accelerate_object_store.checkpointer import ObjectStoreCheckpointer
from accelerate_object_store.settings import ObjectStoreSettings
from accelerate_object_store.storage import ObjectStorage

__all__ = ["ObjectStorage", "ObjectStoreCheckpointer", "ObjectStoreSettings"]
