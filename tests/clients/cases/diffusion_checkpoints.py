"""diffusers, with hooks that save and load the models with the models' own methods, as its scripts do.

The scripts keep the newest checkpoints, which the main process saves alone or all processes save together,
and resume from the latest one.
"""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import running
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, _set_state_dict_into_text_encoder
from diffusers.utils import convert_state_dict_to_diffusers, convert_unet_state_dict_to_peft
from diffusion import ACCUMULATION, BATCH, EPOCHS, collate, end, images, words
from peft import LoraConfig, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from running import case

EVERY, KEPT = 2, 2


def begin(folder: Path, **more: Any) -> Accelerator:
    project = ProjectConfiguration(
        project_dir=str(folder), logging_dir=str(folder / "logs"), **more
    )
    return Accelerator(gradient_accumulation_steps=ACCUMULATION, project_config=project)


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def save_alone(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Remove the oldest checkpoints, and save one on the main process."""
    if accelerator.is_main_process and step % EVERY == 0:
        for path in checkpoints(folder)[: 1 - KEPT]:
            shutil.rmtree(path)
        accelerator.save_state(str(folder / f"checkpoint-{step}"))


def register(accelerator: Accelerator, kind: Any, ema: EMAModel, passed: list[Any]) -> None:
    """Register hooks that save the models and their moving average in diffusers' format."""

    def save_models(models: list[Any], weights: list[Any], output: str) -> None:
        passed.append([type(model).__name__ for model in models])
        if accelerator.is_main_process:
            ema.save_pretrained(str(Path(output, "unet_ema")))
            for model in models:
                model.save_pretrained(str(Path(output, "unet")))
                weights.pop()

    def load_models(models: list[Any], source: str) -> None:
        passed.append([type(model).__name__ for model in models])
        ema.load_state_dict(
            EMAModel.from_pretrained(str(Path(source, "unet_ema")), kind).state_dict()
        )
        ema.to(accelerator.device)
        for _ in range(len(models)):
            model = models.pop()
            loaded = kind.from_pretrained(source, subfolder="unet")
            model.register_to_config(**loaded.config)
            model.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save_models)
    accelerator.register_load_state_pre_hook(load_models)


def results(accelerator: Accelerator, folder: Path, model: Any, **more: Any) -> dict[str, Any]:
    """Return what the processes hold at the end, and the checkpoints' files from the hooks."""
    model = accelerator.unwrap_model(model)
    more["weights"] = running.weights(model)
    own = sum(parameter.detach().double().norm() for parameter in model.parameters())
    more["on_ranks"] = accelerator.gather(torch.tensor([float(own)])).tolist()
    end(accelerator)
    files = [
        path for path in folder.glob("checkpoint-*/*/*") if path.parent.name.startswith("unet")
    ]
    more["files"] = sorted(str(path.relative_to(folder)) for path in files)
    return more


def unconditional_run(folder: Path, resume: bool = False) -> dict[str, Any]:
    accelerator = begin(folder)
    set_seed(3)
    model: Any = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    ema = EMAModel(
        model.parameters(),
        decay=0.99,
        use_ema_warmup=True,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    passed: list[Any] = []
    register(accelerator, UNet2DModel, ema, passed)
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader: Any = torch.utils.data.DataLoader(images(), batch_size=BATCH, shuffle=True)
    schedule: Any = get_scheduler("cosine", optimizer, None, 2 * ACCUMULATION, len(loader) * EPOCHS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    updates = math.ceil(len(loader) / ACCUMULATION)
    step_of = skipped = 0
    if resume:
        latest = checkpoints(folder)[-1]
        accelerator.load_state(str(latest))
        step_of = int(latest.name.split("-")[1])
        skipped = step_of * ACCUMULATION % (updates * ACCUMULATION)
    losses = []
    for epoch in range(step_of // updates, EPOCHS + resume):
        model.train()
        for step, batch in enumerate(loader):
            if step < skipped:
                continue
            clean = batch["input"]
            noise = torch.randn(clean.shape)
            times = torch.randint(0, 50, (len(clean),))
            with accelerator.accumulate(model):
                noisy = noise_scheduler.add_noise(clean, noise, times)
                loss = F.mse_loss(model(noisy, times).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                step_of += 1
                save_alone(accelerator, folder, step_of)
            losses.append([loss.item(), schedule.get_last_lr()[0], ema.cur_decay_value])
        skipped = 0
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            unet = accelerator.unwrap_model(model)
            ema.store(unet.parameters())
            ema.copy_to(unet.parameters())
            pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
            pipeline.set_progress_bar_config(disable=True)
            draw = torch.Generator().manual_seed(epoch)
            sample = pipeline(generator=draw, num_inference_steps=2, output_type="np").images
            losses.append([float(sample.mean())])
            ema.restore(unet.parameters())
            pipeline.save_pretrained(str(folder / "pipeline"))
        accelerator.wait_for_everyone()
    averages = [float(value.double().norm()) for value in ema.shadow_params]
    return results(
        accelerator, folder, model, losses=losses, steps=step_of, ema=averages[:4], passed=passed
    )


@case()
def unconditional_latest(folder: Path) -> Any:
    return {"whole": unconditional_run(folder), "latest": unconditional_run(folder, resume=True)}


def text_to_image_run(folder: Path, resume: bool = False) -> dict[str, Any]:
    accelerator = begin(folder)
    text, vae, unet, data = words(36)
    set_seed(4)
    text.requires_grad_(False)
    vae.requires_grad_(False)
    unet.enable_gradient_checkpointing()
    kind = UNet2DConditionModel
    averaged = copy.deepcopy(unet)
    ema = EMAModel(averaged.parameters(), model_cls=kind, model_config=averaged.config)
    passed: list[Any] = []
    register(accelerator, kind, ema, passed)
    optimizer: Any = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    loader: Any = torch.utils.data.DataLoader(
        data, shuffle=True, collate_fn=collate, batch_size=BATCH
    )
    ranks = accelerator.num_processes
    updates = math.ceil(math.ceil(len(loader) / ranks) / ACCUMULATION)
    # The resumed run trains for an epoch more.
    limit = (EPOCHS + resume) * updates
    schedule: Any = get_scheduler("linear", optimizer, None, 2 * ranks, limit * ranks)
    unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
    ema.to(accelerator.device)
    noise_scheduler = DDPMScheduler(num_train_timesteps=50, prediction_type="v_prediction")
    step_of = 0
    if resume:
        latest = checkpoints(folder)[-1]
        accelerator.load_state(str(latest))
        step_of = int(latest.name.split("-")[1])
    losses = []
    for _ in range(step_of // updates, EPOCHS + resume):
        together = 0.0
        for batch in loader:
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixel_values"]).latent_dist.sample()
                latents = latents * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                times = torch.randint(0, 50, (len(latents),))
                noisy = noise_scheduler.add_noise(latents, noise, times)
                target = noise_scheduler.get_velocity(latents, noise, times)
                hidden = text(batch["input_ids"], return_dict=False)[0]
                predicted = unet(noisy, times, hidden, return_dict=False)[0]
                loss = F.mse_loss(predicted, target)
                average = accelerator.gather(loss.repeat(BATCH)).mean()
                together += average.item() / ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(unet.parameters())
                step_of += 1
                losses.append([together, schedule.get_last_lr()[0]])
                together = 0.0
                save_alone(accelerator, folder, step_of)
            if step_of >= limit:
                break
        if accelerator.is_main_process:
            # The scripts use the wrapped model here.
            ema.store(unet.parameters())
            ema.copy_to(unet.parameters())
            ema.restore(unet.parameters())
    accelerator.wait_for_everyone()
    averages = [float(value.double().norm()) for value in ema.shadow_params]
    return results(
        accelerator, folder, unet, losses=losses, steps=step_of, ema=averages[:4], passed=passed
    )


@case()
def text_to_image(folder: Path) -> Any:
    return {"whole": text_to_image_run(folder), "latest": text_to_image_run(folder, resume=True)}


def adapters(model: Any) -> Any:
    return convert_state_dict_to_diffusers(get_peft_model_state_dict(model))


def two_models_run(folder: Path, resume: bool = False) -> dict[str, Any]:
    """Train LoRA on the model and on its text encoder. Hooks recognize them by their types."""
    saved = sorted(folder.glob("checkpoints/checkpoint_*"))
    following = int(saved[-1].name.split("_")[1]) + 1 if resume else 0
    accelerator = begin(
        folder, automatic_checkpoint_naming=True, total_limit=KEPT, iteration=following
    )
    text, vae, unet, data = words(36)
    set_seed(4)
    for part in (text, vae, unet):
        part.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_k", "to_q", "to_v"]))
    text.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "k_proj", "v_proj"]))
    passed: list[Any] = []

    def save_models(models: list[Any], weights: list[Any], output: str) -> None:
        passed.append([type(model).__name__ for model in models])
        if accelerator.is_main_process:
            layers = {}
            for model in models:
                is_unet = isinstance(
                    accelerator.unwrap_model(model), type(accelerator.unwrap_model(unet))
                )
                layers["unet_lora_layers" if is_unet else "text_encoder_lora_layers"] = adapters(
                    model
                )
                weights.pop()
            StableDiffusionPipeline.save_lora_weights(output, **layers)

    def load_models(models: list[Any], source: str) -> None:
        passed.append([type(model).__name__ for model in models])
        loaded_unet = loaded_text = None
        while models:
            model = models.pop()
            if isinstance(model, type(accelerator.unwrap_model(unet))):
                loaded_unet = model
            else:
                loaded_text = model
        state, _ = StableDiffusionPipeline.lora_state_dict(source)
        start = "unet."
        of_unet = {key[len(start) :]: state[key] for key in state if key.startswith(start)}
        of_unet = convert_unet_state_dict_to_peft(of_unet)
        set_peft_model_state_dict(loaded_unet, of_unet, adapter_name="default")
        _set_state_dict_into_text_encoder(state, prefix="text_encoder.", text_encoder=loaded_text)

    accelerator.register_save_state_pre_hook(save_models)
    accelerator.register_load_state_pre_hook(load_models)
    trained = [p for part in (unet, text) for p in part.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(
        data, shuffle=True, collate_fn=collate, batch_size=BATCH
    )
    schedule: Any = get_scheduler(
        "constant_with_warmup", optimizer, None, 2 * accelerator.num_processes
    )
    unet, text, optimizer, loader, schedule = accelerator.prepare(
        unet, text, optimizer, loader, schedule
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    step_of = following * EVERY
    if resume:
        accelerator.load_state()
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(unet, text):
                latents = vae.encode(batch["pixel_values"]).latent_dist.mode()
                noise = torch.randn_like(latents)
                times = torch.randint(0, 50, (len(latents),))
                noisy = noise_scheduler.add_noise(latents, noise, times)
                hidden = text(batch["input_ids"], return_dict=False)[0]
                loss = F.mse_loss(unet(noisy, times, hidden).sample, noise)
                losses.append(accelerator.gather(loss.repeat(BATCH)).mean().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step_of += 1
                if step_of % EVERY == 0:
                    accelerator.save_state()
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    encoder = running.weights(accelerator.unwrap_model(text))
    return results(accelerator, folder, unet, losses=losses, kept=kept, text=encoder, passed=passed)


@case()
def two_adapters(folder: Path) -> Any:
    return {"whole": two_models_run(folder), "latest": two_models_run(folder, resume=True)}


if __name__ == "__main__":
    running.main()
