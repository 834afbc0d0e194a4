"""Turn data loaders into torchdata's `StatefulDataLoader`, whose datasets save their own position."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from accelerate_core.plugin import ConfigurationError, MissingPluginError


def as_stateful_loader(loader: Any) -> Any:
    """Return a copy of the user's loader as torchdata's `StatefulDataLoader`.

    Raises:
        MissingPluginError: torchdata is not installed.
        ConfigurationError: the loader is not a torch `DataLoader`.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingPluginError(
            "use_stateful_dataloader=True needs torchdata, which is not installed. "
            'Run: pip install "torchdata>=0.10"'
        ) from error
    if isinstance(loader, StatefulDataLoader):
        return loader
    kind: Any = type(loader)
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"use_stateful_dataloader=True needs a torch DataLoader, not a {kind.__name__}."
        )
    stateful: Any = StatefulDataLoader
    if kind is not DataLoader:
        stateful = type(f"Stateful{kind.__name__}", (kind, StatefulDataLoader), {})
    clone = stateful.__new__(stateful)
    state = clone.__dict__
    state.update(_initial_iter_for_state_dict=False, snapshot_every_n_steps=1, next_iter_state=None)
    state.update(loader.__dict__, _iterator=None)
    return clone
