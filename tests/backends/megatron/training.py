"""Shared by the megatron workers: training, and plain Transformers in one process to compare with."""

from __future__ import annotations

import gc
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import CHOSEN, EXPERTS, LENGTH, VOCABULARY, batches, tiny
from torch.utils.data import DataLoader
from transformers.models.mixtral import modeling_mixtral as mixtral
from worker import PG_TIMEOUT, RANK, scratch

from accelerate_core import (
    Accelerator,
    GPTTrainStep,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    ParallelismConfig,
)
from accelerate_core.errors import (
    CheckpointError,
    ConfigurationError,
    PrepareError,
    RuntimeConflictError,
)
from accelerate_core.utils import init_empty_weights, set_seed
from accelerate_megatron.library import imported
from accelerate_megatron.models import conversion_of, parameters_of, weights
from accelerate_megatron.models.norms import layer_spec

cuda_on_cpu.install()

STEPS, CYCLE, BATCH = 8, 2, 8
#: The coefficient of the loss that megatron's routers add.
EVEN = 0.05
CPU = not torch.cuda.is_available()


#: The Accelerator on which `end_training` has not been called yet.
_made: list[Accelerator] = []


def made(sizes: dict[str, int], steps: int = CYCLE, **more: Any) -> Accelerator:
    options = {name: more.pop(name) for name in ("mixed_precision", "project_dir") if name in more}
    # megatron-core calls deprecated functions of torch.
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*")
    for one in _made:
        one.end_training()  # the previous case failed before it called this
    _made[:] = []
    gc.collect()  # process groups and their threads live as long as the models that refer to them
    sizes = {f"{name}_size": size for name, size in sizes.items()}
    accelerator = Accelerator(
        cpu=CPU,
        parallelism_config=ParallelismConfig(**sizes),
        megatron_lm_plugin=MegatronLMPlugin(**more),
        gradient_accumulation_steps=steps,
        process_group_timeout=PG_TIMEOUT,
        **options,
    )
    _made.append(accelerator)
    return accelerator


def adam(model: Any, rate: float = 1e-2) -> Any:
    """Make an optimizer with two groups that differ only in the learning rate."""
    biases = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() != 1]
    return torch.optim.AdamW([{"params": others}, {"params": biases, "lr": 2 * rate}], lr=rate)


@cache
def plain(family: str, rate: float, parts: int = 1) -> tuple[list[float], list[float], Any]:
    """Train in a single process.

    Args:
        parts: the number of parts of a batch; the load of the experts is balanced within each.
    """
    set_seed(0)
    model = tiny(family)
    optimizer = adam(model, rate)
    losses, norms, part = [], [], []
    for number, batch in enumerate(DataLoader(batches(STEPS * CYCLE * BATCH), BATCH)):
        told = model(**batch, **({"output_router_logits": True} if family == "mixtral" else {}))
        loss = told.loss
        ((loss + uneven(told, parts)) / CYCLE).backward()
        part.append(loss.item())
        if number % CYCLE == CYCLE - 1:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(part) / CYCLE)
            part = []
    return losses, norms, model


def uneven(told: Any, parts: int) -> torch.Tensor | float:
    """Return what megatron adds to the loss of a mixture, computed by Transformers' formula."""
    balance = mixtral.load_balancing_loss_func
    losses = [
        balance((part,), EXPERTS, CHOSEN) * EVEN / CHOSEN / parts
        for logits in getattr(told, "router_logits", None) or ()
        for part in logits.chunk(parts)
    ]
    return sum(losses)


def mixture(accelerator: Accelerator) -> Any:
    """Return a provider of the same model as `tiny("mixtral")`."""
    source = tiny("mixtral")
    plugin, mesh = accelerator.state.megatron_lm_plugin, accelerator.parallelism_config
    tp = mesh.size("tp")
    etp = plugin.expert_tensor_parallel_size or tp
    llama = transformers.LlamaConfig(**{
        name: getattr(source.config, name)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
            "rope_parameters",
        )
    })  # fmt: skip
    conversion = conversion_of(llama, tp)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = halves.get(accelerator.mixed_precision, torch.float32)
    options = conversion.transformer | {
        "moe_ffn_hidden_size": llama.intermediate_size,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": CHOSEN,
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": EVEN,
        # With etp 1, allgather would gather parts of different sizes, which gloo does not support.
        "moe_token_dispatcher_type": "alltoall" if etp == 1 else "allgather",
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": mesh.size("pp"),
        "expert_model_parallel_size": plugin.expert_model_parallel_size or 1,
        "expert_tensor_parallel_size": etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        **(plugin.other_megatron_args or {}),
    }

    def provider(pre_process: bool, post_process: bool) -> Any:
        config = imported("transformer.transformer_config").TransformerConfig(**options)
        stage = {"pre_process": pre_process, "post_process": post_process}
        model = imported("models.gpt").GPTModel(
            config, layer_spec(config), **stage, **conversion.model
        )
        fill(model, source.state_dict(), conversion)
        return model

    return provider


@torch.no_grad()
def fill(model: Any, state: dict[str, torch.Tensor], conversion: Any) -> None:
    """Fill a rank's part of a mixture with its weights."""
    groups = imported("parallel_state")
    ep, etp = groups.get_expert_model_parallel_group(), groups.get_expert_tensor_parallel_group()
    tp = groups.get_tensor_model_parallel_group()
    for name, parameter in parameters_of([model]):
        if name.endswith(".bias"):  # only megatron's model has biases; they are initially 0
            continue
        if ".mlp." not in name:
            weight = conversion.weight(name)
            weights.fill(parameter, weight, state.__getitem__, tp.rank(), tp.size())
            continue
        layer = f"model.layers.{name.split('.')[2]}.mlp."
        if name.endswith("router.weight"):
            parameter.copy_(state[f"{layer}gate.weight"])
            continue
        local = int(name.split("local_experts.")[1].split(".")[0])
        expert = ep.rank() * EXPERTS // ep.size() + local
        if "fc1" in name:
            both = state[f"{layer}experts.gate_up_proj"][expert].chunk(2)
            parameter.copy_(torch.cat([one.chunk(etp.size())[etp.rank()] for one in both]))
        else:
            down = state[f"{layer}experts.down_proj"][expert]
            parameter.copy_(down.chunk(etp.size(), 1)[etp.rank()])


def start(
    accelerator: Accelerator, family: str = "gpt2", rate: float = 1e-2
) -> tuple[Any, Any, Any]:
    set_seed(0)
    rows = BATCH // accelerator.parallelism_config.data_parallel_size
    loader = DataLoader(batches(STEPS * CYCLE * BATCH), rows)
    if family == "mixtral":
        model = accelerator.prepare(mixture(accelerator))
        return model, *accelerator.prepare(adam(model, rate), loader)
    model = tiny(family)
    return accelerator.prepare(model, adam(model, rate), loader)


def run(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, *, scheduled: bool
) -> tuple[list[float], list[float]]:
    losses, norms, part = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            if scheduled:
                loss = accelerator.train_step(batch).loss
            else:
                loss = model(**batch).loss
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        part.append(accelerator.reduce(loss.detach(), "mean").item())
        if len(part) == CYCLE:
            losses.append(sum(part) / CYCLE)
            part = []
    return losses, norms


def check(sizes: dict[str, int], family: str = "gpt2", *, loop: bool = True, **more: Any) -> None:
    """Compare the losses, norms and exported weights with those of a single process."""
    limit = more.pop("limit", 1e-5)
    rate = more.pop("rate", 1e-2)
    losses, norms, reference = plain(family, rate, more.pop("parts", 1))
    for scheduled in (False, True) if loop else (True,):
        accelerator = made(sizes, **more)
        model, optimizer, loader = start(accelerator, family, rate)
        found = run(accelerator, model, optimizer, loader, scheduled=scheduled)
        assert max(abs(a - b) for a, b in zip(found[0], losses, strict=True)) <= limit, (
            found[0],
            losses,
        )
        worst = max(abs(a - b) / b for a, b in zip(found[1], norms, strict=True))
        assert worst <= 10 * limit, (found[1], norms)
        if family == "mixtral":  # a mixture cannot be exported
            accelerator.end_training()
            continue
        state = accelerator.get_state_dict(model)
        assert bool(state) == (RANK == 0)
        if RANK == 0 and limit < 1e-3:
            told = reference.state_dict()
            assert state.keys() == told.keys()
            for name, value in state.items():
                # Adam divides by roots of values close to 0, so a few elements differ more.
                torch.testing.assert_close(value, told[name], atol=2e-3, rtol=0)
        accelerator.end_training()


def step(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> float:
    with accelerator.accumulate(model):
        loss = accelerator.train_step(batch).loss
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return float(accelerator.reduce(loss, "mean"))


def check_resume_on_any_layout(layouts: list[dict[str, Any]], family: str = "llama") -> None:
    """Save in the middle; the same layout resumes bit for bit, another one within rounding."""
    for number, layout in enumerate(layouts):
        folder = scratch(f"saved{number}")
        options = dict(layout)
        accelerator = made(options.pop("sizes"), project_dir=str(folder), **options)
        model, optimizer, loader = start(accelerator, family)
        told = []
        for index, batch in enumerate(loader):
            told.append(step(accelerator, model, optimizer, batch))
            if index == 5:
                accelerator.save_state(str(folder / "state"))
            if index == 9:
                break
        accelerator.end_training()
        for other in layouts:
            options = dict(other)
            accelerator = made(options.pop("sizes"), project_dir=str(folder), **options)
            model, optimizer, loader = start(accelerator, family)
            for parameter in model.parameters():
                parameter.data.add_(1.0)  # so that a missing load would be noticed
            accelerator.load_state(str(folder / "state"))
            again = []
            for batch in loader:
                again.append(step(accelerator, model, optimizer, batch))
                if len(again) == 4:
                    break
            accelerator.end_training()
            if other is layout:
                assert again == told[6:], (layout, again, told)
            else:
                worst = max(abs(a - b) for a, b in zip(again, told[6:], strict=True))
                assert worst <= 1e-5, (layout, other, again, told[6:])


def check_biases_of_experts() -> None:
    """Ranks of one tensor group have different experts, so their biases' gradients are not summed."""
    told = []
    for sizes in ({"tp": 2}, {"dp_replicate": 2}):
        more: dict[str, Any] = {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}
        if "tp" in sizes:
            more |= {"num_micro_batches": 2, "sequence_parallelism": True}
        accelerator = made(sizes, other_megatron_args={"add_bias_linear": True}, **more)
        model, optimizer, loader = start(accelerator, "mixtral")
        told.append(run(accelerator, model, optimizer, loader, scheduled=True))
        batch = next(iter(loader))
        accelerator.gradient_accumulation_steps = 1
        counted = accelerator.accumulate(model, num_items=3)
        with pytest.raises(ConfigurationError, match="moe_aux_loss_coeff"), counted:
            accelerator.train_step(batch)
        accelerator.end_training()
    for one, other in zip(*told, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 1e-5, told


def check_unsupported_experts() -> None:
    accelerator = made({"dp_replicate": 2})
    provider = mixture(accelerator)
    accelerator.end_training()
    accelerator = made({"dp_replicate": 2}, expert_model_parallel_size=2)
    with pytest.raises(PrepareError, match="expert_model_parallel_size=1, but the run has 2"):
        accelerator.prepare(provider)
    with pytest.raises(ConfigurationError, match="the model has none"):
        accelerator.prepare(tiny("llama"))
    accelerator.end_training()


def check_num_items(sizes: dict[str, int]) -> None:
    """With `num_items`, the gradients equal those of one whole batch, however it is split."""
    accelerator = made(sizes, num_micro_batches=2)
    model, _, _ = start(accelerator)
    set_seed(0)
    reference = tiny()
    rows = list(DataLoader(batches(2 * BATCH), BATCH))
    for batch in rows:
        for index, row in enumerate(batch["labels"]):
            row[: index % 5] = -100  # a different number in every micro-batch
    items = [int((batch["labels"][:, 1:] != -100).sum()) for batch in rows]
    for batch in rows:
        loss = reference(**batch, num_items_in_batch=sum(items)).loss
        loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
    for batch, count in zip(rows, items, strict=True):
        with accelerator.accumulate(model, num_items=count):
            accelerator.train_step({n: v.to(accelerator.device) for n, v in batch.items()})
            if accelerator.sync_gradients:
                found = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
    assert abs(found - norm) / norm <= 1e-4, (found, norm)
    accelerator.end_training()


def check_eval_logits(sizes: dict[str, int]) -> None:
    accelerator = made(sizes, num_micro_batches=2, return_logits=True)
    set_seed(0)
    model, reference = tiny(), tiny()
    reference.load_state_dict(model.state_dict())
    model, _ = accelerator.prepare(model, adam(model))
    model.eval()
    batch = next(iter(DataLoader(batches(BATCH), BATCH)))
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][::2, :3] = 0  # padded on the left
    batch["labels"][::2, :3] = -100
    batch["position_ids"] = torch.arange(LENGTH).expand(BATCH, LENGTH).clone()
    result = accelerator.eval_step({n: v.to(accelerator.device) for n, v in batch.items()})
    told = reference(**batch)
    where = batch["attention_mask"].bool()
    torch.testing.assert_close(result.outputs.cpu()[where], told.logits[where], atol=1e-5, rtol=0)
    accelerator.end_training()


def check_pipeline_needs_train_step(sizes: dict[str, int]) -> None:
    accelerator = made(sizes, num_micro_batches=3)
    model, _, loader = start(accelerator)
    batch = next(iter(loader))
    with pytest.raises(ConfigurationError, match=r"accelerator\.train_step"):
        model(**batch)
    with pytest.raises(ConfigurationError, match="train_step"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(ConfigurationError, match="num_micro_batches"):
        accelerator.train_step(batch)
    accelerator.end_training()


def check_provider(sizes: dict[str, int]) -> None:
    """The script makes a model of megatron-core, and its optimizer after `prepare`."""
    accelerator = made(sizes, num_micro_batches=2)
    config = imported("transformer.transformer_config").TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes["pp"],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )

    def provider(pre_process: bool, post_process: bool) -> Any:
        return imported("models.gpt").GPTModel(
            config,
            imported("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(),
            vocab_size=66,
            max_sequence_length=LENGTH,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=True,
        )

    model = accelerator.prepare(provider)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    rows = next(iter(DataLoader(batches(BATCH), BATCH)))["input_ids"]
    batch = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    batch = {name: value.to(accelerator.device) for name, value in batch.items()}
    losses = []
    for _ in range(6):
        losses.append(float(accelerator.train_step(batch).loss))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1, losses
    accelerator.end_training()


def check_save_pretrained(sizes: dict[str, int], family: str) -> None:
    """Read weights from a folder, train, save: Transformers trains and saves the same."""
    begin, end = scratch(f"{family}-begin"), scratch(f"{family}-end")
    reference = plain(family, 1e-3)[2]
    kind = type(reference)
    accelerator = made(sizes, num_micro_batches=4, return_logits=True)
    set_seed(0)
    first = tiny(family)
    if accelerator.is_main_process:
        first.save_pretrained(begin)
    accelerator.wait_for_everyone()
    model: Any = kind.from_pretrained(begin).train()
    loader: Any = DataLoader(batches(STEPS * CYCLE * BATCH), BATCH)
    model, optimizer, loader = accelerator.prepare(model, adam(model, 1e-3), loader)
    batch = next(iter(loader))
    found = accelerator.eval_step(batch).outputs.cpu()
    batch = {name: value.cpu() for name, value in batch.items()}
    torch.testing.assert_close(found, first(**batch).logits, atol=1e-4, rtol=0)
    run(accelerator, model, optimizer, loader, scheduled=True)
    state = accelerator.get_state_dict(model)
    model.save_pretrained(end, state_dict=state, is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        last = kind.from_pretrained(end)(**batch).logits
        torch.testing.assert_close(last, reference(**batch).logits, atol=1e-4, rtol=0)
        assert (last - found).abs().max() > 1e-2, "the model was not trained"
    accelerator.end_training()


def check_accelerates_form_of_the_loop() -> None:
    """Calling the model runs the step on a batch of all micro-batches; backward does nothing."""
    losses, _, _ = plain("gpt2", 1e-2)
    options = {"forward_runs_step": True, "multiply_batch": True, "gradient_clipping": 0.5}
    accelerator = made({"pp": 2}, num_micro_batches=2, **options)
    set_seed(0)
    model = tiny()
    optimizer = adam(model)
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=4 * STEPS)
    loader = DataLoader(batches(STEPS * CYCLE * BATCH), BATCH // 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates, found = [], []
    for batch in loader:
        assert len(batch["input_ids"]) == BATCH
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    assert abs(sum(found[:2]) / 2 - losses[0]) <= 1e-5
    assert rates[:2] == [1e-2, 1e-2 * (1 - 1 / (4 * STEPS))]
    model.eval()
    with torch.no_grad():
        assert model(**batch).loss.item() < found[0]
    accelerator.end_training()


def check_custom_steps() -> None:
    """The script's own loss function and step class are used in training."""

    def weighted(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, dict[str, Any]]:
        return 3 * (output.float() * loss_mask).sum() / loss_mask.sum(), {}

    class Step(GPTTrainStep):
        def __init__(self, accelerator: Any, args: Any, factor: float) -> None:
            super().__init__(accelerator, args)
            inner = self.loss_func
            self.loss_func = lambda mask, output: (factor * inner(mask, output)[0], {})

    told = []
    for more in (
        {},
        {"custom_loss_function": weighted},
        {"custom_train_step_class": Step, "custom_train_step_kwargs": {"factor": 3.0}},
    ):
        accelerator = made({"pp": 2}, num_micro_batches=2, **more)
        _, _, loader = start(accelerator)
        told.append(float(accelerator.train_step(next(iter(loader))).loss))
        accelerator.end_training()
    assert max(abs(one - 3 * told[0]) for one in told[1:]) <= 1e-5, told


def check_invalid_input() -> None:
    """Invalid input is one clear error."""
    accelerator = made({"tp": 2})
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(PrepareError, match="provider"):
        accelerator.prepare(linear, torch.optim.AdamW(linear.parameters()))
    model = tiny()
    with pytest.raises(ConfigurationError, match="Adagrad"):
        accelerator.prepare(model, torch.optim.Adagrad(model.parameters()))
    model = tiny("llama")
    model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    with pytest.raises(PrepareError, match="frozen"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model = tiny("llama")
    layers = model.model.layers
    mixed = [
        {"params": [layers[0].self_attn.q_proj.weight]},
        {"params": [layers[0].self_attn.k_proj.weight], "lr": 1.0},
    ]
    with pytest.raises(PrepareError, match="different groups"):
        accelerator.prepare(model, torch.optim.AdamW(mixed))
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(iter(DataLoader(batches(BATCH), BATCH)))
    accelerator.gradient_accumulation_steps = 1
    accelerator.train_step(batch)
    some = list(model.parameters())[:2]
    with pytest.raises(ConfigurationError, match="can only clip a whole model"):
        accelerator.clip_grad_norm_(some, 1.0)
    optimizer.step()
    with pytest.raises(ConfigurationError, match="zero_grad"):
        accelerator.train_step(batch)
    optimizer.zero_grad()
    accelerator.train_step(batch)
    # Importing megatron allows every torch.load to unpickle its classes; the backend undoes that.
    assert not [one for one in torch.serialization.get_safe_globals() if "megatron" in str(one)]
    _made.clear()
    with pytest.raises(RuntimeConflictError, match="parallel_state"):
        made({"pp": 2})
    accelerator.end_training()
    accelerator = made({"dp_shard": 2}, use_distributed_optimizer=True)
    model = tiny()
    with pytest.raises(ConfigurationError, match="AdamW"):
        accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.end_training()
    # With whole modules any optimizer works, but a checkpoint must be able to hold its state.
    accelerator = made({"dp_shard": 2}, steps=1, return_logits=True)
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    with pytest.raises(CheckpointError, match="Adafactor keeps 'row_var'"):
        accelerator.save_state(str(scratch("adafactor")))
    loss, logits = model(**batch, return_dict=False)
    assert (loss.ndim, logits.shape[-1]) == (0, model.vocab_size)
    optimizer.zero_grad()
    accelerator.backend._step = lambda batches, chunk: None
    with pytest.raises(ConfigurationError, match="return_logits"):
        accelerator.train_step(batch)
    accelerator.end_training()


def check_masks_and_labels() -> None:
    """With TP 2, masks, labels and weights mean the same as in Transformers, or are rejected."""
    accelerator = made({"tp": 2}, steps=1)
    set_seed(0)
    model, reference = tiny("llama"), tiny("llama")
    reference.load_state_dict(model.state_dict())
    model = accelerator.prepare(model.eval())
    assert not model.training
    assert not any(module.training for module in model.engine.modules[0].modules())
    batch = next(iter(DataLoader(batches(BATCH), BATCH)))
    tokens, labels = batch["input_ids"], batch["labels"]
    mask = torch.ones_like(tokens)
    mask[:, -4:] = 0
    labels = labels.masked_fill(mask == 0, -100)
    device = accelerator.device

    def loss(*args: torch.Tensor, **kwargs: torch.Tensor) -> float:
        with torch.no_grad():
            given = {name: value.to(device) for name, value in kwargs.items()}
            return model(*(one.to(device) for one in args), **given).loss.item()

    told = float(reference(tokens, mask, labels=labels).loss)
    whole = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    added = torch.zeros(whole.shape).masked_fill(~whole, torch.finfo(torch.float32).min)
    assert loss(tokens, mask, labels=labels) == pytest.approx(told, abs=1e-5)
    for one in (whole, added):
        given = {"input_ids": tokens, "attention_mask": one, "labels": labels}
        assert loss(**given) == pytest.approx(told, abs=1e-5)
    weights = torch.rand(tokens.shape)
    scores = reference(tokens).logits.transpose(1, 2)
    each = F.cross_entropy(scores, tokens, reduction="none")
    weighted = float((each * weights).sum() / weights.sum())
    given = {"tokens": tokens, "labels": tokens, "loss_mask": weights}
    assert loss(**given) == pytest.approx(weighted, abs=1e-5)
    assert loss(input_ids=tokens, labels=torch.full_like(labels, -100)) == 0.0
    wrong = {
        "the label 70, but the vocabulary has 65": {"labels": labels.masked_fill(mask == 0, 70)},
        "the token 10[0-9][0-9], but the vocabulary has 65": {"input_ids": tokens + 1000},
        r"attention_mask has the shape \[8, 16, 16\]": {"attention_mask": whole[:, 0]},
    }
    if device.type == "cpu":
        for text, one in wrong.items():
            with pytest.raises(ConfigurationError, match=text):
                loss(**{"input_ids": tokens, "labels": labels, **one})
    accelerator.end_training()


def check_supported_models() -> None:
    """A config becomes its model; settings that would be lost silently are rejected."""
    accelerator = made({"tp": 2}, steps=1, sequence_parallelism=True)
    model = accelerator.prepare(tiny().config)
    assert model.config.vocab_size == VOCABULARY
    rows = next(iter(DataLoader(batches(4), 4)))
    short = {name: value[:, :15].to(accelerator.device) for name, value in rows.items()}
    with pytest.raises(
        ConfigurationError, match="length of 15 tokens is not divisible by tp_degree=2"
    ):
        model(**short)
    set_seed(0)
    other = tiny()
    other.activation_checkpointing_enable()
    with pytest.raises(PrepareError, match="gradient checkpointing enabled"):
        accelerator.prepare(other)
    torch.manual_seed(accelerator.process_index)
    with pytest.raises(PrepareError, match=r"differs from rank [01]"):
        accelerator.prepare(tiny())
    accelerator.end_training()
    accelerator = made({"pp": 2}, steps=1, other_megatron_args={"num_layers": 1})
    set_seed(0)
    with pytest.raises(PrepareError, match="other_megatron_args sets num_layers=1"):
        accelerator.prepare(tiny())
    accelerator.end_training()
    accelerator = made({"pp": 2}, steps=1, num_micro_batches=2)
    set_seed(0)
    frozen = tiny()
    frozen.get_input_embeddings().requires_grad_(False)
    with pytest.raises(PrepareError, match="is frozen and tied to its head"):
        accelerator.prepare(frozen)
    accelerator.end_training()
    with pytest.raises(
        ConfigurationError, match=r"num_micro_batches 3 / 2 = 1\.5 is not an integer"
    ):
        made({"pp": 2}, num_micro_batches=3, num_layers_per_virtual_pipeline_stage=1)
    recomputes = {"recompute_granularity": "full", "recompute_method": "uniform"}
    accelerator = made({"tp": 2}, recompute_num_layers=3, **recomputes)
    set_seed(0)
    with pytest.raises(
        ConfigurationError, match="4 layers, which is not divisible by recompute_num_layers=3"
    ):
        accelerator.prepare(tiny())
    accelerator.end_training()
    accelerator = made({"pp": 2}, steps=1, num_micro_batches=2)
    set_seed(0)
    # One stage is entirely frozen, positions apply to all samples, and some labels are ignored.
    model = tiny("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name or "layers.3" in name or "lm_head" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(ConfigurationError, match="train_step needs labels"):
        accelerator.train_step({"input_ids": rows["input_ids"].to(accelerator.device)})
    batch = {name: value.to(accelerator.device) for name, value in rows.items()}
    batch["labels"][2:] = -100
    places = torch.arange(LENGTH, device=accelerator.device)[None]
    batch = {"position_ids": places, **batch}
    losses = []
    for _ in range(2):
        losses.append(float(accelerator.train_step(batch).loss))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    accelerator.end_training()


def check_checkpoint_of_another_model(folder: Path) -> None:
    """Another vocabulary that has the same size when padded, and weights without a parameter."""
    accelerator = made({"tp": 2}, steps=1)
    set_seed(0)
    accelerator.prepare(tiny())
    accelerator.save_state(str(folder / "state"))
    accelerator.end_training()
    for change in ({"vocab_size": 66}, {"n_layer": 3}):
        accelerator = made({"tp": 2}, steps=1)
        config = tiny().config
        config.update(change)
        accelerator.prepare(config)
        said = "vocabulary of 65 tokens" if "vocab_size" in change else "but in no model"
        with pytest.raises(CheckpointError, match=said):
            accelerator.load_state(str(folder / "state"))
        accelerator.end_training()


def check_meta_models_and_plain_modules() -> None:
    """Meta models are read from their folder; `model.zero_grad` clears buffers; plain modules train."""
    folder = scratch("pretrained")
    set_seed(0)
    reference = tiny("llama")
    if RANK == 0:
        reference.save_pretrained(folder)
    accelerator = made({"tp": 2}, steps=1)
    accelerator.wait_for_everyone()
    config = transformers.AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        shell = transformers.AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in shell.parameters())
    model = accelerator.prepare(shell.train())
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = next(iter(DataLoader(batches(BATCH), BATCH)))
    batch = {name: value.to(accelerator.device) for name, value in batch.items()}
    told = float(reference(**{name: value.cpu() for name, value in batch.items()}).loss)
    norms = []
    for _ in range(2):
        loss = model(**batch).loss
        assert float(loss) == pytest.approx(told, abs=1e-5)
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e3)))
        model.zero_grad()
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 0
    del optimizer
    accelerator.end_training()
    accelerator = made({"dp_replicate": 2}, steps=1, num_micro_batches=2)

    class Plain(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    plain = Plain(4, 4)
    plain, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        rows = torch.ones(4, 4, device=accelerator.device)
        losses.append(float(accelerator.train_step({"x": rows}).loss))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    accelerator.end_training()
