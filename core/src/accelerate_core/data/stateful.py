"""Reading through torchdata's `StatefulDataLoader`, without rebuilding the user's loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from accelerate_core.errors import ConfigurationError, MissingPluginError

__all__ = ["as_stateful"]


def as_stateful(loader: Any) -> Any:
    """Return the loader, a copy of the user's, as a `StatefulDataLoader` of the same attributes.

    Raises:
        MissingPluginError: torchdata is not installed.
        ConfigurationError: the loader is no `DataLoader`.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingPluginError(
            "use_stateful_dataloader=True needs torchdata, which is not installed. "
            'Run: pip install "accelerate-core[stateful]"'
        ) from error
    if isinstance(loader, StatefulDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"use_stateful_dataloader=True needs a torch DataLoader, not a {type(loader).__name__}."
        )
    kind: Any = type(loader)
    if kind is DataLoader:
        stateful: Any = StatefulDataLoader
    else:
        stateful = type(f"Stateful{kind.__name__}", (kind, StatefulDataLoader), {})
    clone = stateful.__new__(stateful)
    clone.__dict__.update(loader.__dict__)
    clone.__dict__.setdefault("snapshot_every_n_steps", 1)
    clone.__dict__.setdefault("next_iter_state", None)
    clone.__dict__.setdefault("_initial_iter_for_state_dict", False)
    clone.__dict__["_iterator"] = None
    return clone
