"""`from_pretrained` with every kind of device map, and the related functions of Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import running
import torch
from accelerate import (
    Accelerator,
    PartialState,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import (
    compute_module_sizes,
    find_tied_parameters,
    get_max_memory,
    set_module_tensor_to_device,
)
from running import case
from tiny import classifier, judge, old_writer, rewriter, translator, writer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

IDS = torch.tensor([[1, 5, 9, 33, 12], [1, 40, 3, 21, 8]])
LAYERS = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


_GPT2 = ("wte", "wpe", "drop", "h.0", "h.1", "ln_f")
SPLIT_GPT2 = {
    **{f"transformer.{name}": "cpu" for name in _GPT2},
    "transformer.h.0": "disk",
    "lm_head": "cpu",
}
_T5 = ("embed_tokens", "block.0", "block.1", "final_layer_norm", "dropout")
SPLIT_T5 = {
    "shared": "cpu",
    **{f"{half}.{name}": "cpu" for half in ("encoder", "decoder") for name in _T5},
    "encoder.block.1": "disk",
    "decoder.block.0": "disk",
    "lm_head": "cpu",
}


def saved(folder: Path, model: Any = None, size: str = "12KB") -> str:
    place = folder / "saved"
    if running.RANK == 0 and not place.exists():
        (model or writer()).save_pretrained(place, max_shard_size=size)
    if running.WORLD > 1:
        PartialState(cpu=True).wait_for_everyone()
    return str(place)


def state(model: Any) -> dict[str, Any]:
    return {
        "map": getattr(model, "hf_device_map", None),
        "meta": sorted(name for name, one in model.named_parameters() if one.is_meta),
    }


def asked(model: Any, ids: torch.Tensor = IDS) -> dict[str, Any]:
    """Return a model's devices and outputs. It runs twice, which reveals hooks that lose weights."""
    model.eval()
    with torch.no_grad():
        first = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
    assert torch.equal(first, again)
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    return {
        **state(model),
        "logits": [float(first.double().sum()), float(first.double().norm())],
        "written": written,
    }


def mapped(folder: Path, **more: Any) -> dict[str, Any]:
    plain = asked(writer(tie_word_embeddings=False))
    place = saved(folder, writer(tie_word_embeddings=False))
    made = asked(AutoModelForCausalLM.from_pretrained(place, **more))
    assert plain["logits"] == made["logits"]
    assert plain["written"].equal(made["written"])
    return made


def _map(device_map: Any, **more: Any) -> Any:
    return lambda folder: mapped(
        folder,
        device_map=device_map,
        **{
            name: str(folder / value) if name == "offload_folder" else value
            for name, value in more.items()
        },
    )


#: Device maps by name, with other arguments for `from_pretrained`.
MAPS: dict[str, Any] = {
    "auto": _map("auto"),
    "balanced": _map("balanced"),
    "balanced_low_0": _map("balanced_low_0"),
    "sequential": _map("sequential"),
    "cpu": _map("cpu"),
    "whole_on_cpu": _map({"": "cpu"}),
    "by_layer": _map(LAYERS),
    "partly_on_disk": _map(
        {**LAYERS, "model.layers.1": "disk", "lm_head": "disk"}, offload_folder="off"
    ),
    "max_memory_floats": _map("auto", max_memory={"cpu": 1e9}),
    "max_memory_strings": _map("auto", max_memory={"cpu": "1GB", "disk": "2GiB"}),
    "auto_and_the_disk": _map("auto", max_memory={"cpu": 20_000}, offload_folder="off"),
    "auto_and_buffers": _map(
        "auto", max_memory={"cpu": 22_000.5}, offload_folder="off", offload_buffers=True
    ),
    "sequential_and_the_disk": _map("sequential", max_memory={"cpu": "25KB"}, offload_folder="off"),
}
for _name, _made in MAPS.items():
    _made.__name__ = _name
    case(1)(_made)


@case()
def auto_with_others(folder: Path) -> Any:
    """Load other types of models. Each process loads its own."""
    places = {"bert": (classifier(), AutoModelForSequenceClassification)}
    places["judge"] = (judge(), AutoModelForSequenceClassification)
    places["bart"] = (translator(), AutoModelForSeq2SeqLM)
    made = {}
    for name, (model, kind) in places.items():
        folder.joinpath(name).mkdir(exist_ok=True)
        place = saved(folder / name, model, size="8KB")
        loaded = kind.from_pretrained(place, device_map="auto").eval()
        loaded.train()
        tied = find_tied_parameters(loaded)
        loaded.eval()
        with torch.no_grad():
            logits = loaded(input_ids=IDS).logits
        made[name] = {**state(loaded), "norm": float(logits.double().norm()), "tied": sorted(tied)}
    small = AutoModel.from_pretrained(place, device_map="cpu")
    made["base"] = {**state(small), "weights": running.weights(small)}
    return made


@case(1)
def generations(folder: Path) -> Any:
    """Generate text with Llama, GPT-2 and T5, without a map, on the CPU, and partly on disk."""
    kinds = {
        "llama": (writer(), AutoModelForCausalLM, {**LAYERS, "model.layers.1": "disk"}),
        "gpt2": (old_writer(), AutoModelForCausalLM, SPLIT_GPT2),
        "t5": (rewriter(), AutoModelForSeq2SeqLM, SPLIT_T5),
    }
    made: dict[str, Any] = {}
    for name, (model, kind, split) in kinds.items():
        place = folder / name
        model.eval().save_pretrained(place)
        plain = model.generate(IDS, max_new_tokens=6, do_sample=False)
        for how, device_map in {"auto": "auto", "cpu": "cpu", "split": split}.items():
            loaded = kind.from_pretrained(
                place, device_map=device_map, offload_folder=str(folder / f"{name} {how}")
            ).eval()
            first = loaded.generate(IDS, max_new_tokens=6, do_sample=False)
            again = loaded.generate(IDS, max_new_tokens=6, do_sample=False)
            assert first.equal(again)
            assert first.equal(plain)
            made[f"{name} {how}"] = {**state(loaded), "written": first}
    return made


@case(1)
def prepared_and_saved(folder: Path) -> Any:
    place = saved(folder, classifier())
    model = AutoModelForSequenceClassification.from_pretrained(place, device_map="auto")
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    accelerator.save_model(model, folder / "again", max_shard_size="8KB")
    names = sorted(path.name for path in (folder / "again").iterdir())
    return {**state(model), "device": str(model.device), "files": names}


@case(1)
def by_hand(folder: Path) -> Any:
    """Use `infer_auto_device_map`, `dispatch_model` and offloading on the same model."""
    model = writer(tie_word_embeddings=False).eval()
    sizes = compute_module_sizes(model)
    plain = asked(model)["logits"]
    budget = {"cpu": 20_000, "disk": 1e9}
    maps = {
        "layers": infer_auto_device_map(
            model, max_memory=dict(budget), no_split_module_classes=model._no_split_modules
        ),
        "split": infer_auto_device_map(model, dict(budget), []),
        "half": infer_auto_device_map(model, dict(budget), [], dtype=torch.float16),
        "clean": infer_auto_device_map(model, dict(budget), [], clean_result=False),
    }
    found: dict[str, Any] = {"maps": maps, "sizes": dict(sizes)}
    found["limits"] = get_max_memory({0: "1GB", "cpu": 2.5e9, "disk": "1MiB"})
    for name in ("layers", "split"):
        model = writer(tie_word_embeddings=False).eval()
        made = dispatch_model(model, maps[name], offload_dir=str(folder / name), force_hooks=True)
        found[f"dispatched {name}"] = asked(made)
        assert found[f"dispatched {name}"]["logits"] == plain
    found["cpu_offload"] = asked(
        cpu_offload(writer(tie_word_embeddings=False), torch.device("cpu"))
    )
    offloaded = disk_offload(writer(tie_word_embeddings=False), str(folder / "d"), "cpu")
    found["disk_offload"] = asked(offloaded)
    remove_hook_from_submodules(offloaded)
    found["removed"] = state(offloaded)
    held, hook = cpu_offload_with_hook(writer(tie_word_embeddings=False), "cpu")
    found["with_hook"] = asked(held)
    hook.offload()
    hook.remove()
    return found


@case(1)
def loaded_by_hand(folder: Path) -> Any:
    place = saved(folder, writer(tie_word_embeddings=False))
    config = AutoConfig.from_pretrained(place)
    found: dict[str, Any] = {}
    for name, more in {
        "auto": {"device_map": "auto", "max_memory": {"cpu": 30_000}},
        "layers": {"device_map": LAYERS, "dtype": torch.bfloat16},
        "buffers": {"device_map": {**LAYERS, "lm_head": "disk"}, "offload_buffers": True},
        "whole": {"device_map": {"": "cpu"}, "strict": True},
    }.items():
        with init_empty_weights(include_buffers=False):
            empty = AutoModelForCausalLM.from_config(config)
        made = load_checkpoint_and_dispatch(
            empty,
            place,
            offload_folder=str(folder / name),
            offload_state_dict=name == "auto",
            no_split_module_classes=["LlamaDecoderLayer"],
            **more,
        )
        found[name] = asked(made)
    with init_on_device(torch.device("meta"), include_buffers=True):
        bare = torch.nn.Linear(2, 2)
    assert bare.weight.is_meta
    set_module_tensor_to_device(bare, "weight", "cpu", torch.ones(2, 2), dtype=torch.float16)
    found["set"] = [str(bare.weight.dtype), bare.weight.sum().item()]
    plain = writer(tie_word_embeddings=False)
    torch.nn.init.zeros_(plain.lm_head.weight)
    load_checkpoint_in_model(plain, place, device_map={"": "cpu"})
    found["in_model"] = asked(plain)
    return found


running.main()
