"""One rank of a run that reads records with the configured loader factory."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accelerate_core import Accelerator, DataLoaderConfiguration
from accelerate_core.errors import ConfigurationError
from accelerate_testing import write_result


def main() -> None:
    accelerator = Accelerator(cpu=True, process_group_timeout=60)
    imported = [name for name in sys.modules if name.split(".")[0] == "accelerate_records"]
    other = accelerator.prepare(DataLoader(range(4)))
    with tempfile.TemporaryDirectory() as made:
        from accelerate_records import Records, write_records

        folder = Path(made) / "data"
        write_records(folder, [{"id": torch.tensor(i)} for i in range(10)], per_shard=4)
        loader = accelerator.prepare(DataLoader(Records(folder), 2, shuffle=True))
        whole, seen, state = [], [], None
        for batch in loader:
            whole.append(batch["id"].tolist())
            seen += accelerator.gather_for_metrics(batch["id"]).tolist()
            state = state or loader.state_dict()
        loader.load_state_dict(state)
        rest = [batch["id"].tolist() for batch in loader]
        split = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
        try:
            split.prepare(DataLoader(Records(folder), 3))
            refused, notes = "", []
        except ConfigurationError as error:
            refused, notes = str(error), error.__notes__
    write_result(
        {
            "imported": imported,
            "kind": type(loader.base).__name__,
            "other": type(other).__name__,
            "whole": whole,
            "seen": seen,
            "rest": rest,
            "explain": accelerator.explain(),
            "refused": refused,
            "notes": notes,
        }
    )
    accelerator.end_training()


main()
