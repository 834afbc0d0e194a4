"""`accelerate-core merge-weights`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("merge-weights")
@click.argument(
    "checkpoint", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--unsafe_serialization",
    "--unsafe-serialization",
    is_flag=True,
    help="Write pytorch_model.bin instead of model.safetensors.",
)
@click.option(
    "--remove_checkpoint_dir",
    "--remove-checkpoint-dir",
    is_flag=True,
    help="Remove DIR once the merged file stands.",
)
def command(
    checkpoint: Path, output: Path, unsafe_serialization: bool, remove_checkpoint_dir: bool
) -> None:
    """Merge the sharded weights in DIR into one file in the folder OUT.

    DIR is what save_state or save_model wrote, or a torch.distributed.checkpoint directory.
    """
    from accelerate_checkpoint.merging import merge_weights
    from accelerate_core.builtin.console import console

    with console(stderr=True).status(f"Merging {checkpoint}"):
        made = merge_weights(
            checkpoint,
            output,
            safe_serialization=not unsafe_serialization,
            remove=remove_checkpoint_dir,
        )
    click.echo(f"Merged weights: {made}")
