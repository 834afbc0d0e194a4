"""The arithmetic of `estimate-memory`: tensors by name and number of elements, and who divides them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate_core.errors import ConfigurationError, PluginError, did_you_mean, listing
from accelerate_core.plugins.discovery import PluginRecord, disabled_names, installed

#: Bytes of an element. What has less than two is not trained as it is.
DTYPES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}

#: States of the weights' size that an optimizer keeps.
_OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}

_BLOCK = re.compile(r"^(.*?\.\d+)(\.|$)")


def shapes_of(model: str, *, trust_remote_code: bool = False) -> dict[str, int]:
    """Return the number of elements of every tensor of a model, by name; no weight is read.

    Raises:
        ConfigurationError: it is neither a checkpoint here, nor a config, nor a name that the hub
            answers to.
    """
    path = Path(model)
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return _of_folder(path, trust_remote_code)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        return _of_hub(model)
    raise ConfigurationError(f"There is no file or folder {model!r}.")


def _of_file(path: Path) -> dict[str, int]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                names = list(file.keys())
                return {name: math.prod(file.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise ConfigurationError(f"{path} is not a safetensors file: {error}.") from None
    if path.name == "config.json":
        return _of_config(path.parent, False)
    if path.suffix in (".bin", ".pt", ".pth"):
        import torch

        try:
            state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds for what is no checkpoint
            reason = str(error).splitlines()[0]
            raise ConfigurationError(f"{path} is not a checkpoint of torch: {reason}") from None
        tensors = {name: value for name, value in dict(state).items() if hasattr(value, "numel")}
        return {str(name): int(value.numel()) for name, value in tensors.items()}
    raise ConfigurationError(
        f"{path} is not a checkpoint; known are .safetensors, .bin, .pt, .pth and config.json."
    )


def _of_folder(path: Path, trust_remote_code: bool) -> dict[str, int]:
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = sorted(path.glob(pattern))
        if files:
            return {name: count for file in files for name, count in _of_file(file).items()}
    if (path / "config.json").is_file():
        return _of_config(path, trust_remote_code)
    raise ConfigurationError(
        f"{path} has neither weights (*.safetensors, pytorch_model*.bin) nor a config.json."
    )


def _of_config(path: Path, trust_remote_code: bool) -> dict[str, int]:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            f"{path} has a config.json and no weights; to build the model it describes (without "
            "memory) transformers is needed: pip install transformers"
        ) from None
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            # The class the file names: AutoModel would leave its head out.
            named = getattr(transformers, (config.architectures or [""])[0], None)
            auto: Any = transformers.AutoModel
            if named is not None:
                model = named._from_config(config)
            else:
                model = auto.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds for a config it cannot build
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"transformers cannot build {path}/config.json: {reason}"
        ) from None
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def _of_hub(name: str) -> dict[str, int]:
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigurationError(
            f"There is no file or folder {name!r}. To look it up on the Hugging Face hub: "
            "pip install huggingface_hub"
        ) from None
    try:
        found = huggingface_hub.get_safetensors_metadata(name)
    except Exception as error:  # no network, no such name, no safetensors: each has its class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"There is no file or folder {name!r}, and the Hugging Face hub did not tell its "
            f"shapes: {reason}"
        ) from None
    files = found.files_metadata.values()
    return {
        tensor: math.prod(about.shape) for file in files for tensor, about in file.tensors.items()
    }


def largest_layer(sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the block with most elements: one of a numbered series, else one module."""
    blocks: dict[str, int] = {}
    for name, count in sizes.items():
        found = _BLOCK.match(name)
        block = found.group(1) if found else name.rpartition(".")[0] or name
        blocks[block] = blocks.get(block, 0) + count
    return max(blocks.items(), key=lambda item: item[1]) if blocks else ("", 0)


def world_sizes(words: Iterable[str]) -> list[int]:
    """Return the numbers of processes asked about."""
    words = list(words)
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise ConfigurationError(f"world_sizes={' '.join(words)!r} must be positive numbers.")
    return sorted({int(word) for word in words})


def by_dtype(
    sizes: Mapping[str, int], dtypes: Sequence[str], optimizer: str
) -> list[dict[str, Any]]:
    """Return one row per dtype, in bytes; None where a dtype is not trained as it is."""
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        parts: dict[str, Any] = _parts(sizes, dtype, optimizer)
        parts["training"] = parts["weights"] + parts["gradients"] + parts["optimizer"]
        if DTYPES[dtype] < 2:
            parts |= dict.fromkeys(("gradients", "optimizer", "training"))
        rows.append({"dtype": dtype, **parts})
    return rows


def by_backend(
    sizes: Mapping[str, int],
    dtypes: Sequence[str],
    optimizer: str,
    worlds: Sequence[int],
    environ: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return what one rank takes to train, per dtype, backend with its mode, and world size.

    What is divided is declared by each backend (`Backend.shards`); where weights are, the largest
    layer is whole for as long as it computes.
    """
    disabled = disabled_names(environ)
    modes = [
        (f"{record.name} {mode}".strip(), frozenset(divided))
        for record in installed().of_kind("backend")
        if record.name not in disabled
        for mode, divided in _shards(record).items()
    ]
    rows = []
    for dtype in dtypes:
        parts = _parts(sizes, dtype, optimizer)
        for name, divided in modes if DTYPES[dtype] >= 2 else ():
            taken = {str(world): _rank(parts, divided, world) for world in worlds}
            rows.append({"dtype": dtype, "backend": name, "bytes": taken})
    return rows


def _shards(record: PluginRecord) -> Mapping[str, Sequence[str]]:
    try:
        return getattr(record.load(), "shards", None) or {}
    except PluginError:
        return {}  # `plugins` shows what is broken


def _rank(parts: Mapping[str, int], divided: frozenset[str], world: int) -> int:
    total = sum(
        math.ceil(parts[name] / world) if name in divided else parts[name]
        for name in ("weights", "gradients", "optimizer")
    )
    return total + (parts["largest_layer"] if "weights" in divided and world > 1 else 0)


def _parts(sizes: Mapping[str, int], dtype: str, optimizer: str) -> dict[str, int]:
    if dtype not in DTYPES:
        raise ConfigurationError(
            f"dtypes: {dtype!r} is not one of {listing(DTYPES)}.{did_you_mean(dtype, DTYPES)}"
        )
    if optimizer.lower() not in _OPTIMIZERS:
        hint = did_you_mean(optimizer, _OPTIMIZERS)
        raise ConfigurationError(
            f"optimizer={optimizer!r} is not one of {listing(_OPTIMIZERS)}.{hint}"
        )
    weights = math.ceil(sum(sizes.values()) * DTYPES[dtype])
    return {
        "weights": weights,
        "largest_layer": math.ceil(largest_layer(sizes)[1] * DTYPES[dtype]),
        "gradients": weights,
        "optimizer": weights * _OPTIMIZERS[optimizer.lower()],
    }
