"""LoRA training of a small Stable Diffusion 3 transformer.

The loop is like the one in diffusers' `train_dreambooth_lora_sd3.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import (
    cast_training_params,
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)
from diffusers.utils import convert_unet_state_dict_to_peft
from peft import LoraConfig, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from running import case, weights
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION, STEPS, PRIOR_WEIGHT = 2, 6, 0.7
TARGETS = ["attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"]
TARGETS += ["attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v"]


def small() -> Any:
    model = SD3Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    model.requires_grad_(False)
    lora = LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=TARGETS)
    model.add_adapter(lora)
    return model


def pairs(instances_and_prior: list[Any]) -> list[torch.Tensor]:
    """Collate a batch with all instances first and their prior samples after them, as the script does."""
    columns = zip(*instances_and_prior, strict=True)
    return [torch.cat(torch.stack(column).unbind(1)) for column in columns]


def latents(rows: int = 20) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 4, 4), (2, 5, 16), (2, 8))  # latents, prompts, pooled prompts
    tensors = [torch.randn(rows, *shape, generator=made) for shape in shapes]
    return DataLoader(TensorDataset(*tensors), batch_size=2, shuffle=True, collate_fn=pairs)


def train(folder: Path, resume: bool, precondition: bool = False, **more: Any) -> Any:
    project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs"))
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION,
        project_config=project,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        **more,
    )
    set_seed(7)
    kept = copy.deepcopy(FlowMatchEulerDiscreteScheduler(shift=3.0))
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    transformer = small().to(accelerator.device, dtype=dtype)
    transformer.enable_gradient_checkpointing()

    def save(models: Any, given: Any, place: Any) -> None:
        if accelerator.is_main_process:
            layers = None
            for model in models:
                assert isinstance(accelerator.unwrap_model(model), SD3Transformer2DModel)
                layers = get_peft_model_state_dict(accelerator.unwrap_model(model))
                given.pop()
            StableDiffusion3Pipeline.save_lora_weights(place, transformer_lora_layers=layers)

    def load(models: Any, place: Any) -> None:
        model = accelerator.unwrap_model(models.pop())
        state = StableDiffusion3Pipeline.lora_state_dict(place)
        named = {k.removeprefix("transformer."): v for k, v in state.items() if "transformer" in k}
        named = convert_unet_state_dict_to_peft(named)
        assert not getattr(set_peft_model_state_dict(model, named), "unexpected_keys", None)
        if dtype is not torch.float32:
            cast_training_params([model])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    if dtype is not torch.float32:
        cast_training_params([transformer], dtype=torch.float32)
    trained = [one for one in transformer.parameters() if one.requires_grad]
    groups = [{"params": trained, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-4)
    rate = get_scheduler(
        "constant_with_warmup",
        optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=STEPS * accelerator.num_processes,
    )
    transformer, optimizer, loader, rate = accelerator.prepare(
        transformer, optimizer, latents(), rate
    )
    done = 0
    if resume:
        accelerator.load_state(str(folder / "checkpoint"))
        done = STEPS // 2
    random = torch.Generator().manual_seed(11 + accelerator.process_index)
    losses = []
    while done < STEPS:
        transformer.train()
        for model_input, prompts, pooled in loader:
            with accelerator.accumulate([transformer]):
                noise = torch.randn(model_input.shape, generator=random)
                density = compute_density_for_timestep_sampling(
                    "logit_normal", len(model_input), 0.0, 1.0, 1.29, generator=random
                )
                at = (density * kept.config.num_train_timesteps).long()
                sigmas = kept.sigmas[at].view(-1, 1, 1, 1)
                noisy = (1.0 - sigmas) * model_input + sigmas * noise
                guess = transformer(
                    hidden_states=noisy.to(dtype),
                    timestep=kept.timesteps[at],
                    encoder_hidden_states=prompts.to(dtype),
                    pooled_projections=pooled.to(dtype),
                    return_dict=False,
                )[0]
                wanted = noise - model_input
                if precondition:
                    guess = guess * (-sigmas) + noisy
                    wanted = model_input
                weighting = compute_loss_weighting_for_sd3("sigma_sqrt", sigmas=sigmas)
                error = weighting.float() * (guess.float() - wanted.float()) ** 2
                instances, prior = torch.chunk(error, 2, dim=0)
                loss = instances.reshape(len(instances), -1).mean(1).mean()
                loss = loss + PRIOR_WEIGHT * prior.reshape(len(prior), -1).mean(1).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
                optimizer.step()
                rate.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
            if accelerator.sync_gradients:
                done += 1
                if done == STEPS // 2 and not resume:
                    accelerator.save_state(str(folder / "checkpoint"))
            if done == STEPS:
                break
    accelerator.wait_for_everyone()
    model = accelerator.unwrap_model(transformer)
    return {"losses": losses, "lr": rate.get_last_lr(), "weights": weights(model)}


@case()
def lora(folder: Path) -> Any:
    return train(folder, resume=False)


@case()
def lora_in_bf16(folder: Path) -> Any:
    return train(folder, resume=False, precondition=True, mixed_precision="bf16")


@case(1)
def lora_resumed(folder: Path) -> Any:
    train(folder, resume=False)
    return train(folder, resume=True)


if __name__ == "__main__":
    from running import main

    main()
