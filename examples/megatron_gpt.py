"""Train a GPT-2 or Llama from Transformers with tensor, pipeline and data parallelism, set by flags.

    accelerate-core launch --num_processes 4 examples/megatron_gpt.py --tp 2 --pp 2 --micro_batches 4
    accelerate-core launch --num_processes 4 examples/megatron_gpt.py --tp 2 --sequence_parallel
    accelerate-core launch --num_processes 4 examples/megatron_gpt.py --distributed_optimizer
    accelerate-core launch --num_processes 2 examples/megatron_gpt.py --pp 2 --micro_batches 4 --resume

The flags set the tensor and pipeline parallel sizes. The remaining factor of the number of processes is
the data parallel size. A checkpoint of any of these runs can be resumed as any other (`--resume`). At
the end, the model is saved in the format of Transformers. megatron-core needs one GPU per process. The
text is the source code of Python's standard library, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import string
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from accelerate_core import Accelerator, MegatronLMPlugin
from accelerate_core.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

ALPHABET = "\n" + string.printable[:95]


class Progress:
    """The number of optimizer steps. It is registered for checkpointing."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def small_model(args: argparse.Namespace) -> Any:
    """A model with random weights. You can also use one from `from_pretrained`."""
    shared = {"vocab_size": len(ALPHABET), "bos_token_id": 0, "eos_token_id": 0}
    if args.family == "gpt2":
        config: Any = GPT2Config(
            n_positions=args.length,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=args.heads,
            **shared,
        )
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.length,
        **shared,
    )
    return LlamaForCausalLM(config)


def standard_library(letters: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Rows of letters, as indices into ALPHABET. Models of Transformers shift the labels."""
    number = {letter: index for index, letter in enumerate(ALPHABET)}
    text: list[int] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        text += [number[letter] for letter in source if letter in number]
        if len(text) > letters:
            break
    rows = torch.tensor(text[: len(text) // length * length]).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def held_out_loss(accelerator: Accelerator, model: Any, loader: Any) -> float:
    """The mean loss over rows that are not used for training."""
    model.eval()
    losses = torch.stack([accelerator.eval_step(batch).loss for batch in loader])
    model.train()
    return float(accelerator.reduce(losses.mean(), "mean"))


def train(args: argparse.Namespace) -> None:
    plugin = MegatronLMPlugin(
        tp_degree=args.tp,
        pp_degree=args.pp,
        num_micro_batches=args.micro_batches,
        num_layers_per_virtual_pipeline_stage=args.interleave,
        use_distributed_optimizer=args.distributed_optimizer,
        sequence_parallelism=args.sequence_parallel,
    )
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
        megatron_lm_plugin=plugin,
        # The batch size is the total of all processes, for any mesh.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(
            str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(args.seed)
    model = small_model(args)
    weights = sum(parameter.numel() for parameter in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    rows = standard_library(args.letters, args.length)
    held_out: Any = DataLoader(rows[-2 * args.batch_size :], args.batch_size)
    rows = rows[: -2 * args.batch_size]
    loader: Any = DataLoader(rows, args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, schedule, loader, held_out = accelerator.prepare(
        model, optimizer, schedule, loader, held_out
    )
    here = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(
        f"tp {args.tp} x pp {args.pp}, {accelerator.num_processes} process(es); {weights:,} weights, "
        f"{here:,} of them on the first process"
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.print(f"resuming from {accelerator.load_state()}")
    started, losses = time.perf_counter(), []
    while progress.step < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                # Runs forward and backward of all micro-batches. `step` reduces the gradients.
                losses.append(accelerator.train_step(batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            if progress.step % args.report_every == 0 or progress.step == args.steps:
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                other = held_out_loss(accelerator, model, held_out)
                accelerator.print(
                    f"step {progress.step:>4}  loss {mean:7.4f}  held-out loss {other:8.5f}"
                    f"  {time.perf_counter() - started:5.0f} s"
                )
                losses.clear()
                accelerator.save_state()
            if progress.step == args.steps:
                break
    model.save_pretrained(
        args.output_dir / "model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),  # gathered from all ranks
    )
    accelerator.print(f"checkpoints, and model/ for from_pretrained, are in {args.output_dir}")
    accelerator.end_training()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a GPT with megatron-core on the source text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--family", choices=["gpt2", "llama"], default="gpt2", help="model of Transformers")
    add("--tp", type=int, default=1, help="tensor parallelism: ranks that split each layer")
    add("--pp", type=int, default=1, help="pipeline parallelism: number of stages")
    add("--micro_batches", type=int, default=1, help="micro-batches per batch in the pipeline")
    add("--interleave", type=int, help="layers per virtual stage; each rank gets several of them")
    add("--distributed_optimizer", action="store_true", help="shard the optimizer's state")
    add("--sequence_parallel", action="store_true", help="with --tp: also split activations")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched, or no")
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--batch_size", type=int, default=32, help="rows per batch on all processes together")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--letters", type=int, default=1_000_000, help="how much text to read")
    add("--length", type=int, default=64, help="letters per row")
    add("--width", type=int, default=128, help="size of the hidden vectors")
    add("--heads", type=int, default=4, help="attention heads")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--report_every", type=int, default=50, help="steps between two reports and checkpoints")
    add("--seed", type=int, default=0, help="for weights, shuffling and dropout")
    add("--output_dir", type=Path, default=Path("megatron_gpt_output"), help="where to write")
    add("--resume", action="store_true", help="resume from the newest checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
