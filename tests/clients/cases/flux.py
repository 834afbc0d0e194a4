"""LoRA training of a small Flux transformer, as in diffusers' `train_dreambooth_lora_flux.py`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import (
    cast_training_params,
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)
from diffusers.utils.torch_utils import is_compiled_module
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from running import case, weights
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION, STEPS = 2, 6
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]


def small() -> Any:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS))
    return model


def latents(rows: int = 24) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(1)
    shapes = ((4, 4, 4), (5, 16), (8,))  # latents, prompts, pooled prompts
    tensors = [torch.randn(rows, *shape, generator=made) for shape in shapes]
    return DataLoader(TensorDataset(*tensors), batch_size=2, shuffle=True)


def train(folder: Path, resume: bool, **more: Any) -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, **more)
    set_seed(7)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    kept = copy.deepcopy(scheduler)
    transformer = small().to(accelerator.device)
    transformer.enable_gradient_checkpointing()

    def unwrapped(model: Any) -> Any:
        model = accelerator.unwrap_model(model)
        return model._orig_mod if is_compiled_module(model) else model

    def save(models: Any, given: Any, place: Any) -> None:
        if accelerator.is_main_process:
            (model,) = models
            layers = get_peft_model_state_dict(unwrapped(model))
            FluxPipeline.save_lora_weights(place, transformer_lora_layers=layers)
            given.pop()

    def load(models: Any, place: Any) -> None:
        state = FluxPipeline.lora_state_dict(place)
        named = {k.removeprefix("transformer."): v for k, v in state.items() if "transformer" in k}
        model = unwrapped(models.pop())
        assert not getattr(set_peft_model_state_dict(model, named), "unexpected_keys", None)
        if accelerator.mixed_precision == "fp16":
            cast_training_params([model])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    trained = [one for one in transformer.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    steps = STEPS * accelerator.num_processes
    rate = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=steps)
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
            with accelerator.accumulate(transformer):
                rows, channels, height, width = model_input.shape
                noise = torch.randn(model_input.shape, generator=random)
                density = compute_density_for_timestep_sampling(
                    "logit_normal", rows, 0.0, 1.0, 1.29, generator=random
                )
                at = (density * kept.config.num_train_timesteps).long()
                sigmas = kept.sigmas[at].view(-1, 1, 1, 1)
                noisy = (1.0 - sigmas) * model_input + sigmas * noise
                packed = FluxPipeline._pack_latents(noisy, rows, channels, height, width)
                ids = FluxPipeline._prepare_latent_image_ids(
                    rows, height // 2, width // 2, accelerator.device, noisy.dtype
                )
                guess = transformer(
                    hidden_states=packed,
                    timestep=kept.timesteps[at] / 1000,
                    guidance=torch.full((rows,), 3.5),
                    pooled_projections=pooled,
                    encoder_hidden_states=prompts,
                    txt_ids=torch.zeros(prompts.shape[1], 3),
                    img_ids=ids,
                    return_dict=False,
                )[0]
                guess = FluxPipeline._unpack_latents(guess, height * 8, width * 8, 8)
                weighting = compute_loss_weighting_for_sd3("none", sigmas=sigmas)
                error = weighting.float() * (guess.float() - (noise - model_input).float()) ** 2
                loss = error.reshape(rows, -1).mean(1).mean()
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
    model = unwrapped(transformer)
    return {"losses": losses, "lr": rate.get_last_lr(), "weights": weights(model)}


@case()
def lora(folder: Path) -> Any:
    return train(folder, resume=False)


@case()
def lora_in_bf16(folder: Path) -> Any:
    return train(folder, resume=False, mixed_precision="bf16")


@case(1)
def lora_resumed(folder: Path) -> Any:
    train(folder, resume=False)
    return train(folder, resume=True)


if __name__ == "__main__":
    from running import main

    main()
