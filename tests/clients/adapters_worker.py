"""Train adapters on sharded models. Arguments: a folder that all ranks share, and names of cases.

Each case returns facts, which rank 0 writes to `FOLDER/CASE.json`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.distributed import DistributedConfig

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.errors import ConfigurationError, PrepareError
from accelerate_core.utils import (
    FullyShardedDataParallelPlugin,
    TorchTensorParallelConfig,
    set_seed,
)

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
FOUR: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}


def accelerator_of(**more: Any) -> Accelerator:
    if WORLD > 1:
        more = {
            "fsdp_plugin": FullyShardedDataParallelPlugin(),
            "parallelism_config": ParallelismConfig(dp_shard_size=WORLD),
            **more,
        }
    return Accelerator(cpu=True, gradient_accumulation_steps=2, **more)


def split(plan: dict[str, Any] | None = None) -> Accelerator:
    """Return an Accelerator that splits layers over both ranks."""
    handler = None if plan is None else TorchTensorParallelConfig(plan=plan)
    config = ParallelismConfig(tp_size=2, tp_handler=handler)
    return accelerator_of(fsdp_plugin=None, parallelism_config=config)


def base(folder: Path, quantized: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return a Llama, as `from_pretrained` loads it."""
    if quantized is not None:
        more |= {"quantization_config": BitsAndBytesConfig(**quantized), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder.parent / f"base_{RANK}", **more)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu") and WORLD == 1:
            # Otherwise, evaluation would round the weights of one process.
            module.support_avx512bf16_for_cpu = False
    return model


def adapted(model: Any) -> Any:
    """Add LoRA, with the same values on any number of ranks."""
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            value = 0.1 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            parameter.data.copy_(value)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def frozen(model: Any) -> dict[str, torch.Tensor]:
    """Return the frozen weights as they are stored, whole."""
    return {n: whole(p).clone() for n, p in model.named_parameters() if not p.requires_grad}


def adapters(model: Any) -> list[float]:
    return torch.cat([whole(p).flatten() for p in model.parameters() if p.requires_grad]).tolist()


def held_bytes(model: Any) -> int:
    """Return the bytes of frozen weights on this rank."""
    held = [p for p in model.parameters() if not p.requires_grad]
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in held)


def batches(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (8, 12), generator=generator) for _ in range(count)]


def rows(accelerator: Accelerator, ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a batch. Ranks of `tp` have the same ones."""
    config = accelerator.parallelism_config
    if WORLD == 1 or (config is not None and config.tp_enabled):
        return ids
    return ids[accelerator.process_index :: WORLD]


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, data: list[torch.Tensor]
) -> list[float]:
    """Train, each rank on its part of each batch. Return the losses."""
    losses = []
    model.train()
    for ids in data:
        mine = rows(accelerator, ids)
        with accelerator.accumulate(model):
            loss = model(input_ids=mine, labels=mine).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def prepared(accelerator: Accelerator, model: Any) -> tuple[Any, Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))


def compared(
    accelerator: Accelerator, before: dict[str, torch.Tensor], still: Any, trained: Any
) -> dict[str, Any]:
    """Return what must be equal on one and two ranks.

    Args:
        before: the frozen weights of `still` before the training.
        still: the model with the frozen weights.
        trained: the model that was trained; it may be the same.
    """
    after = frozen(still)
    return {
        "adapters": adapters(trained),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "frozen": {name: float(one.double().norm()) for name, one in after.items()},
        "state": sorted(accelerator.get_state_dict(trained)),
    }


def run(
    folder: Path,
    quantized: dict[str, Any] | None = None,
    accelerator: Accelerator | None = None,
    **loaded: Any,
) -> dict[str, Any]:
    """Train 16 micro-batches, evaluate, and save in the middle. Then resume and compare."""
    accelerator = accelerator or accelerator_of()

    def fresh() -> tuple[Any, Any]:
        model = base(folder, quantized, **loaded)
        if quantized is not None:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        return prepared(accelerator, adapted(model))

    model, optimizer = fresh()
    before = frozen(model)
    losses = train(accelerator, model, optimizer, batches(0, 8))
    model.eval()
    with torch.no_grad():
        ids = batches(5, 1)[0]
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    accelerator.save_state(str(folder / "state"))
    losses += train(accelerator, model, optimizer, batches(1, 8))
    found = {
        "losses": losses,
        "bytes": held_bytes(model),
        **compared(accelerator, before, model, model),
    }
    accelerator.free_memory()
    del model, optimizer
    gc.collect()
    model, optimizer = fresh()
    accelerator.load_state(str(folder / "state"))
    again = train(accelerator, model, optimizer, batches(1, 8))
    found["resumed"] = again == losses[-8:] and adapters(model) == found["adapters"]
    accelerator.end_training()
    return found


def lora(folder: Path) -> dict[str, Any]:
    return run(folder)


def lora_on_bf16(folder: Path) -> dict[str, Any]:
    """Frozen weights are bf16. PEFT makes adapters in fp32, so each unit of FSDP2 has both."""
    return run(folder, dtype=torch.bfloat16)


def lora_on_split_layers(folder: Path) -> dict[str, Any]:
    if WORLD == 1:
        return run(folder)
    return run(folder, accelerator=split(), distributed_config=DistributedConfig(tp_size=2))


def lora_on_shards_at_load(folder: Path) -> dict[str, Any]:
    if WORLD == 1:
        return run(folder)
    return run(folder, distributed_config=DistributedConfig(fsdp_size=2))


def qlora(folder: Path) -> dict[str, Any]:
    return run(folder, FOUR)


def qlora_8_bit(folder: Path) -> dict[str, Any]:
    return run(folder, {"load_in_8bit": True})


def lora_on_own_plan(folder: Path) -> dict[str, Any]:
    if WORLD == 1:
        return run(folder)
    layer = "base_model.model.model.layers.*"
    columns = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ]
    plan = {
        f"{layer}.{name}.{part}": "colwise"
        for name in columns
        for part in ("base_layer", "lora_B.default")
    } | {
        f"{layer}.{name}.{part}": "rowwise"
        for name in ("self_attn.o_proj", "mlp.down_proj")
        for part in ("base_layer", "lora_A.default")
    }
    return run(folder, accelerator=split(plan))


def distil(folder: Path, sharded_teacher: bool) -> dict[str, Any]:
    """Train a student on the outputs of a frozen teacher."""
    accelerator = accelerator_of()
    teacher = base(folder).eval().requires_grad_(False)
    if sharded_teacher:
        teacher = accelerator.prepare(teacher)
    set_seed(3)
    student = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))
    student, optimizer = prepared(accelerator, student)
    before = frozen(teacher)
    losses, held = [], []
    for ids in batches(0, 8):
        mine = rows(accelerator, ids)
        with torch.no_grad():
            wanted = teacher(input_ids=mine).logits.log_softmax(-1)
        held.append(held_bytes(teacher))
        with accelerator.accumulate(student):
            given = student(input_ids=mine).logits.log_softmax(-1)
            loss = torch.nn.functional.kl_div(
                given, wanted, log_target=True, reduction="none"
            ).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(student.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    found = {
        "losses": losses,
        "bytes": max(held),
        "resumed": True,
        **compared(accelerator, before, teacher, student),
    }
    accelerator.end_training()
    return found


def sharded_teacher(folder: Path) -> dict[str, Any]:
    return distil(folder, sharded_teacher=True)


def whole_teacher(folder: Path) -> dict[str, Any]:
    return distil(folder, sharded_teacher=False)


def mistakes(folder: Path) -> dict[str, Any]:
    """Return the errors about 4-bit weights, and whether rank 0's scales were sent."""
    accelerator = accelerator_of()

    def error(model: Any, accelerator: Accelerator = accelerator) -> str:
        """Return the error of `prepare`, or an empty string."""
        try:
            accelerator.prepare(model)
        except (ConfigurationError, PrepareError) as error:
            return str(error)
        return ""

    def model_with(**more: Any) -> Any:
        set_seed(accelerator.process_index)  # other weights on each rank
        layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, **more)
        return torch.nn.Sequential(layer, torch.nn.Linear(64, 8))

    repacked = model_with().to("cpu")
    repacked[0].weight.quant_state.packing_format_for_cpu = True
    found = {"not quantized": error(model_with()), "repacked": error(repacked)}
    found["floats"] = error(base(folder, {**FOUR, "bnb_4bit_quant_storage": torch.float32}))
    model = model_with().to("cpu")
    before = model[0].weight.quant_state.absmax.clone()
    model = accelerator.prepare(model)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    outputs = accelerator.gather(model(x).detach()[None])
    found["sent"] = bool(torch.equal(outputs[0], outputs[-1]))
    changed = not torch.equal(model[0].quant_state.absmax, before)
    found["changed"] = accelerator.communicator.gather_object(changed)
    accelerator.end_training()
    half = accelerator_of(mixed_precision="bf16")
    floats = {**FOUR, "bnb_4bit_quant_storage": torch.float32}
    found["converted"] = error(base(folder, floats), half)
    half.end_training()
    found["own plan"] = error(adapted(base(folder)), accelerator := split())
    accelerator.end_training()
    wrong = {"base_model.model.model.layers.*.mlp.up_proj": "colwise"}
    found["adapter"] = error(adapted(base(folder)), accelerator := split(wrong))
    accelerator.end_training()
    plan = {"model.layers.*.mlp.up_proj": "colwise"}
    found["packed"] = error(base(folder, FOUR), accelerator := split(plan))
    accelerator.end_training()
    return found


def main(folder: Path, names: list[str]) -> None:
    set_seed(2)
    # Each rank writes its own, before there is a process group.
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / f"base_{RANK}")
    for name in names:
        own = folder / name
        own.mkdir(exist_ok=True)
        found = globals()[name](own)
        if RANK == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
