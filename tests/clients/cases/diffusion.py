"""diffusers, with loops like those in its training scripts.

They save and start trackers on the main process only, and log on all processes. A resumed run itself skips
the batches that it has already seen, by counting or with `skip_first_batches`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import datasets
import running
import torch
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs, skip_first_batches
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import (
    AutoencoderKL,
    DDPMPipeline,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers
from diffusers.utils.torch_utils import is_compiled_module
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from running import case
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm.auto import tqdm
from transformers import CLIPTextConfig, CLIPTextModel

logger = get_logger(__name__, log_level="INFO")
EPOCHS, ACCUMULATION, BATCH, SAVED_AT = 2, 2, 4, 4


def images():
    data = datasets.Dataset.from_dict({"image": load_digits().images[:48].tolist()})

    def transform(examples):
        made = [torch.tensor(image)[None] / 8 - 1 for image in examples["image"]]
        return {"input": [one.flip(-1) if torch.rand(()) < 0.5 else one for one in made]}

    return data.with_transform(transform)


def begin(folder, **more):
    return Accelerator(
        gradient_accumulation_steps=ACCUMULATION,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder / "logs"),
        kwargs_handlers=[InitProcessGroupKwargs()],
        **more,
    )


def end(accelerator):
    """End training, but keep the process group for the next run."""
    if running.WORLD == 1:
        accelerator.end_training()
    for tracker in accelerator.trackers if running.WORLD > 1 else ():
        tracker.finish()
    running.reset(dict(os.environ))


def train(folder, resume=None):
    accelerator = begin(folder)
    set_seed(3)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    ema = EMAModel(
        model.parameters(),
        decay=0.99,
        use_ema_warmup=True,
        model_cls=UNet2DModel,
        model_config=model.config,
    )

    def save_model(models, weights, output):
        if accelerator.is_main_process:
            ema.save_pretrained(str(Path(output) / "unet_ema"))
            for one in models:
                accelerator.unwrap_model(one).save_pretrained(str(Path(output) / "unet"))
                weights.pop()

    def load_model(models, source):
        loaded = EMAModel.from_pretrained(str(Path(source) / "unet_ema"), UNet2DModel)
        ema.load_state_dict(loaded.state_dict())
        ema.to(accelerator.device)
        for _ in range(len(models)):
            one = accelerator.unwrap_model(models.pop())
            read = UNet2DModel.from_pretrained(source, subfolder="unet")
            one.register_to_config(**read.config)
            one.load_state_dict(read.state_dict())

    accelerator.register_save_state_pre_hook(save_model)
    accelerator.register_load_state_pre_hook(load_model)

    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    with accelerator.main_process_first():
        data = images()
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    schedule = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=2 * ACCUMULATION,
        num_training_steps=len(loader) * EPOCHS,
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    ema.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers("train", config={"epochs": EPOCHS, "resume": resume or "no"})
    logger.info("begin")

    step_of, skip = 0, 0
    updates = math.ceil(len(loader) / ACCUMULATION)
    first = 0
    if resume:
        accelerator.load_state(str(folder / f"checkpoint-{SAVED_AT}"))
        step_of = SAVED_AT
        first = step_of // updates
        skip = step_of * ACCUMULATION % (updates * ACCUMULATION)
    losses = []
    for epoch in range(first, EPOCHS):
        model.train()
        bar = tqdm(total=updates, disable=not accelerator.is_local_main_process)
        batches, start = loader, 0
        if resume == "skip_first_batches" and epoch == first:
            batches, start = skip_first_batches(loader, skip), skip
        for step, batch in enumerate(batches, start):
            if resume == "count" and epoch == first and step < skip:
                if step % ACCUMULATION == 0:
                    bar.update(1)
                continue
            clean = batch["input"]
            noise = torch.randn(clean.shape, device=clean.device)
            times = torch.randint(0, 50, (clean.shape[0],), device=clean.device).long()
            noisy = noise_scheduler.add_noise(clean, noise, times)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy, times).sample.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                bar.update(1)
                step_of += 1
                if accelerator.is_main_process and step_of == SAVED_AT and not resume:
                    path = folder / f"checkpoint-{step_of}"
                    accelerator.save_state(str(path))
                    logger.info(f"saved {path}")
            logs = {"loss": loss.detach().item(), "lr": schedule.get_last_lr()[0], "step": step_of}
            bar.set_postfix(**logs)
            accelerator.log(logs, step=step_of)
            losses += accelerator.gather(loss.detach().repeat(BATCH)).tolist()[::BATCH]
        bar.close()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and epoch == EPOCHS - 1:
            unet = accelerator.unwrap_model(model)
            ema.store(unet.parameters())
            ema.copy_to(unet.parameters())
            pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
            pipeline.save_pretrained(str(folder / "pipeline"))
            ema.restore(unet.parameters())
    averages = [float(each.double().norm()) for each in ema.shadow_params]
    weights = running.weights(accelerator.unwrap_model(model))
    end(accelerator)
    return {"losses": losses, "steps": step_of, "ema": averages[:4], "weights": weights}


@case()
def unconditional(folder: Path) -> Any:
    ways = {"whole": None, "counted": "count", "skipped": "skip_first_batches"}
    return {**{name: train(folder, way) for name, way in ways.items()}, "logged": logged(folder)}


def words(rows):
    """Return the parts of a pipeline, and data: images of digits, each with tokens that describe it."""
    set_seed(5)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            projection_dim=16,
            bos_token_id=0,
            eos_token_id=39,
            pad_token_id=1,
        )
    )
    vae = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        sample_size=8,
        latent_channels=2,
        norm_num_groups=4,
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    unet = UNet2DConditionModel(
        sample_size=4,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    digits = load_digits()
    tokens = [
        [0, *(3 * digit + n for n in range(6)), 39] for digit in digits.target[:rows].tolist()
    ]
    data = datasets.Dataset.from_dict({"image": digits.images[:rows].tolist(), "input_ids": tokens})
    return text, vae, unet, data


def collate(examples):
    pixels = torch.tensor([example["image"] for example in examples])[:, None] / 8 - 1
    return {
        "pixel_values": pixels.contiguous().float(),
        "input_ids": torch.tensor([example["input_ids"] for example in examples]),
    }


def train_lora(folder, precision, resume=False):
    accelerator = begin(folder, mixed_precision=precision)
    text, vae, unet, data = words(48)
    set_seed(4)

    def unwrap(model):
        model = accelerator.unwrap_model(model)
        return model._orig_mod if is_compiled_module(model) else model

    for part in (unet, vae, text):
        part.requires_grad_(False)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(
        accelerator.mixed_precision, torch.float32
    )
    unet.add_adapter(
        LoraConfig(
            r=2,
            lora_alpha=2,
            init_lora_weights="gaussian",
            target_modules=["to_k", "to_q", "to_v", "to_out.0"],
        )
    )
    for part in (unet, vae, text):
        part.to(accelerator.device, dtype=dtype)
    if dtype != torch.float32:
        cast_training_params(unet, dtype=torch.float32)
    layers = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(layers, lr=1e-2)
    with accelerator.main_process_first():
        data = data.shuffle(seed=4).select(range(36))
    loader = torch.utils.data.DataLoader(data, shuffle=True, collate_fn=collate, batch_size=BATCH)
    share = math.ceil(len(loader) / accelerator.num_processes)
    updates = EPOCHS * math.ceil(share / ACCUMULATION)
    schedule = get_scheduler(
        "linear",
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=updates * accelerator.num_processes,
    )
    unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
    per_epoch = math.ceil(len(loader) / ACCUMULATION)
    assert per_epoch * EPOCHS == updates
    if accelerator.is_main_process:
        accelerator.init_trackers("text2image", config={"precision": precision, "rank": 2})
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)

    step_of, first = 0, 0
    if resume:
        accelerator.print("resuming")
        accelerator.load_state(folder / f"checkpoint-{SAVED_AT}")
        step_of = SAVED_AT
        first = step_of // per_epoch
    losses = []
    for _ in range(first, EPOCHS):
        unet.train()
        together = 0.0
        for batch in loader:
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixel_values"].to(dtype=dtype)).latent_dist.sample()
                latents = latents * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                times = torch.randint(0, 50, (latents.shape[0],), device=latents.device).long()
                noisy = noise_scheduler.add_noise(latents, noise, times)
                hidden = text(batch["input_ids"], return_dict=False)[0]
                predicted = unet(noisy, times, hidden, return_dict=False)[0]
                loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
                average = accelerator.gather(loss.repeat(BATCH)).mean()
                together += average.item() / ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(layers, 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step_of += 1
                accelerator.log({"train_loss": together}, step=step_of)
                losses.append(together)
                together = 0.0
                if step_of == SAVED_AT and not resume and accelerator.is_main_process:
                    place = folder / f"checkpoint-{step_of}"
                    accelerator.save_state(place)
                    state = convert_state_dict_to_diffusers(get_peft_model_state_dict(unwrap(unet)))
                    StableDiffusionPipeline.save_lora_weights(
                        save_directory=place, unet_lora_layers=state, safe_serialization=True
                    )
            accelerator.log(
                {"step_loss": loss.detach().item(), "lr": schedule.get_last_lr()[0]}, step=step_of
            )
            if step_of >= updates:
                break
        if accelerator.is_main_process:
            with torch.no_grad():
                shown = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
            for tracker in accelerator.trackers:
                if tracker.name == "tensorboard":
                    tracker.writer.add_images(
                        "validation", shown.float().numpy(), step_of, dataformats="NCHW"
                    )
    accelerator.wait_for_everyone()
    state = {}
    if accelerator.is_main_process:
        unet = unwrap(unet).to(torch.float32)
        state = convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
        StableDiffusionPipeline.save_lora_weights(
            save_directory=folder, unet_lora_layers=state, safe_serialization=True
        )
    end(accelerator)
    norms = {name: float(value.norm()) for name, value in state.items()}
    return {"losses": losses, "steps": step_of, "lora": norms}


def logged(folder):
    """Return the number of values that the trackers wrote, and their sum, by name."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        reader = EventAccumulator(str(path))
        reader.Reload()
        for tag in reader.Tags()["scalars"]:
            found.setdefault(tag, []).extend(event.value for event in reader.Scalars(tag))
        for tag in reader.Tags()["images"]:
            found.setdefault(tag, []).append(len(reader.Images(tag)))
    return {tag: [len(values), float(sum(values))] for tag, values in sorted(found.items())}


@case()
def text_to_image_lora(folder: Path) -> Any:
    runs = {"whole": train_lora(folder, "no"), "again": train_lora(folder, "no", resume=True)}
    return {**runs, "logged": logged(folder)}


@case(1)
def text_to_image_lora_bf16(folder: Path) -> Any:
    return {"whole": train_lora(folder, "bf16"), "again": train_lora(folder, "bf16", resume=True)}


if __name__ == "__main__":
    running.main()
