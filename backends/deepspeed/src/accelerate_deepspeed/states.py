"""Checkpoints of engines, by DeepSpeed's own writer and reader, inside our directory."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_core.errors import CheckpointError, ConfigurationError, did_you_mean, listing
from accelerate_deepspeed.reading import beside_the_optimizer, check_file, read_file

if TYPE_CHECKING:
    from accelerate_core import AcceleratorView

__all__ = ["load", "save", "to_universal", "whole_state"]

_SAVE_OPTIONS = ("exclude_frozen_parameters",)
_LOAD_OPTIONS = ("strict", "load_module_strict", "load_optimizer_states", "load_module_only")
_NOTE = "engines.json"


def whole_state(accelerator: AcceleratorView, model: Any) -> dict[str, Any]:
    """Return a model's whole state dict; with stage 3 rank 0's only."""
    partitioned = getattr(model, "zero_optimization_partition_weights", None)
    if partitioned is not None and partitioned():
        # Whatever its name says, the dtype is that of the parameters.
        return dict(model._zero3_consolidated_16bit_state_dict() or {})
    return dict(accelerator.unwrap_model(model).state_dict())


def save(accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]) -> None:
    """Write engines with `save_checkpoint`, other models as tensors.

    A rank that cannot write goes on to where the others wait, and fails then.
    """
    _known("save_state", options, _SAVE_OPTIONS)
    if accelerator.is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    told: list[dict[str, Any]] = []
    trouble: BaseException | None = None
    engines: list[Any] = list(accelerator.models)
    for index, model in enumerate(engines):
        if not _trains(model):
            state = whole_state(accelerator, model)
            if accelerator.is_main_process:
                torch.save(state, directory / f"model_{index}.pt")
            told.append({"engine": False})
            continue
        writer = _writer()
        before, model.checkpoint_engine = model.checkpoint_engine, writer
        try:
            model.save_checkpoint(
                str(directory), tag=f"engine_{index}", client_state={}, save_latest=False, **options
            )
        finally:
            model.checkpoint_engine = before
        trouble = trouble or writer.trouble
        told.append(
            {
                "engine": True,
                "stage": int(model.zero_optimization_stage()),
                "data_ranks": int(model.dp_world_size),
                "model_ranks": int(model.mp_world_size),
            }
        )
    if accelerator.is_main_process and trouble is None:
        (directory / _NOTE).write_text(json.dumps({"models": told}, indent=1))
    if trouble is not None:
        raise trouble


def load(accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]) -> None:
    """Read what `save` wrote; on another number of ranks by the universal form."""
    _known("load_state", options, _LOAD_OPTIONS)
    try:
        told = json.loads((directory / _NOTE).read_text())["models"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{directory} has no {_NOTE}: it was not written with DeepSpeed ({error})."
        ) from None
    if len(told) != len(accelerator.models):
        raise CheckpointError(
            f"{directory} has {len(told)} models, and {len(accelerator.models)} are prepared."
        )
    arguments = {
        name: options[name]
        for name in ("load_optimizer_states", "load_module_only")
        if name in options
    }
    strict = bool(options.get("load_module_strict", options.get("strict", True)))
    for index, (model, saved) in enumerate(zip(accelerator.models, told, strict=True)):
        if not _trains(model):
            if saved["engine"]:
                raise CheckpointError(f"Model {index} of {directory} was trained by an engine.")
            _load_plain(accelerator, model, read_file(directory / f"model_{index}.pt"), strict)
            continue
        if not saved["engine"]:
            raise CheckpointError(f"Model {index} of {directory} was not trained by an engine.")
        tag = f"engine_{index}"
        for path in sorted((directory / tag).glob("*.pt")):
            check_file(path)
        if _fits(model, saved):
            _load_engine(model, directory, tag, strict, arguments)
        else:
            with _universal(accelerator, directory, tag, model, saved) as folder:
                _load_universal(model, folder, tag, strict, arguments)
                # The universal form has what the optimizer holds, and nothing else.
                _load_others(accelerator, model, beside_the_optimizer(directory / tag))


def _trains(model: Any) -> bool:
    return hasattr(model, "accelerate_trained")


def _known(what: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"{what}({name}=...) is not known with DeepSpeed, which takes {listing(known)}."
                f"{did_you_mean(name, known)}"
            )


def _load_plain(accelerator: AcceleratorView, model: Any, state: Any, strict: bool) -> None:
    from accelerate_deepspeed.zero import gathered

    module = accelerator.unwrap_model(model)
    with gathered(list(module.parameters()), modifier_rank=0):
        if accelerator.is_main_process or not any(hasattr(p, "ds_id") for p in module.parameters()):
            module.load_state_dict(state, strict=strict)


@torch.no_grad()
def _load_others(
    accelerator: AcceleratorView, model: Any, state: Mapping[str, torch.Tensor]
) -> None:
    from accelerate_deepspeed.zero import gathered

    module = accelerator.unwrap_model(model)
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name].reshape(buffer.shape))
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad and n in state}
    with gathered(list(frozen.values()), modifier_rank=0):
        for name, parameter in frozen.items():
            if parameter.numel():
                parameter.copy_(state[name].reshape(parameter.shape))


def _fits(model: Any, saved: Mapping[str, Any]) -> bool:
    stage = int(model.zero_optimization_stage())
    if stage == 0 and saved["stage"] == 0:
        return True
    same_ranks = saved["data_ranks"] == int(model.dp_world_size)
    same_parts = saved["model_ranks"] == int(model.mp_world_size)
    return bool(same_ranks and same_parts and stage == saved["stage"])


def _load_engine(
    model: Any, directory: Path, tag: str, strict: bool, arguments: Mapping[str, Any]
) -> None:
    with _reader(model):
        path, _ = model.load_checkpoint(
            str(directory), tag=tag, load_module_strict=strict, **arguments
        )
    if path is None:
        raise CheckpointError(f"DeepSpeed has not found {directory / tag}.")


def _load_universal(
    model: Any, folder: Path, tag: str, strict: bool, arguments: Mapping[str, Any]
) -> None:
    config = model._config
    config.load_universal_checkpoint = True
    try:
        _load_engine(model, folder, tag, strict, arguments)
    finally:
        config.load_universal_checkpoint = False


@contextmanager
def _universal(
    accelerator: AcceleratorView, directory: Path, tag: str, model: Any, saved: Mapping[str, Any]
) -> Iterator[Path]:
    """Have the checkpoint in the form that any number of ranks reads, beside it, for a while."""
    stage = int(model.zero_optimization_stage())
    if 0 in (saved["stage"], stage) or (saved["stage"] == 3) != (stage == 3):
        raise CheckpointError(
            f"{directory.parent} was saved at ZeRO stage {saved['stage']} on "
            f"{saved['data_ranks']} ranks, and does not load at stage {stage} on "
            f"{int(model.dp_world_size)}: go on at the same stage (1 and 2 are alike), or start from "
            "its weights (accelerate-core deepspeed consolidate)."
        )
    accelerator.note_once(
        f"{directory.parent} was saved on {saved['data_ranks']} ranks at stage {saved['stage']}: "
        "it is converted to DeepSpeed's universal form first."
    )
    checkpoint = directory.parent
    token = accelerator.communicator.broadcast_object(secrets.token_hex(4))
    folder = checkpoint.parent / f".{checkpoint.name}.universal-{token}"
    trouble: str | None = None
    if accelerator.is_main_process:
        try:
            to_universal(directory / tag, folder / tag)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
    trouble = accelerator.communicator.broadcast_object(trouble)
    try:
        if trouble is not None:
            raise CheckpointError(
                f"{checkpoint} could not be converted to DeepSpeed's universal form: {trouble}"
            )
        yield folder
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


def to_universal(source: Path, target: Path, workers: int = 1) -> None:
    """Convert an engine's files to DeepSpeed's universal form, which any number of ranks reads.

    Raises:
        CheckpointError: a file is damaged or holds strange objects, or the stage is 0.
    """
    for path in sorted(source.glob("*.pt")):
        check_file(path)
    if not list(source.glob("*_optim_states.pt")):
        raise CheckpointError(
            f"{source} has no *_optim_states.pt: a checkpoint of stage 0 loads on any number of "
            "ranks as it is."
        )
    from deepspeed.checkpoint import ds_to_universal

    target.mkdir(parents=True)
    said = io.StringIO()
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(said):
        ds_to_universal.main(arguments)


# --- files ----------------------------------------------------------------------------------------


def _writer() -> Any:
    """Return a writer that keeps a failure for the end, so that no rank waits for one that left."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Writer(TorchCheckpointEngine):
        trouble: BaseException | None = None

        def __init__(self) -> None:
            self.name = "accelerate"
            self.zipfile_serialization = True

        def makedirs(self, path: Any, exist_ok: bool = False) -> None:
            self._try(lambda: Path(path).mkdir(parents=True, exist_ok=True))

        def save(self, state_dict: Any, path: str) -> None:
            self._try(lambda: torch.save(state_dict, path))

        def _try(self, act: Any) -> None:
            try:
                act()
            except (OSError, RuntimeError) as error:  # torch.save turns a full disk into the latter
                self.trouble = self.trouble or error

    return Writer()


@contextmanager
def _reader(engine: Any) -> Iterator[None]:
    """Let an engine read its files without unpickling anything strange."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Reader(TorchCheckpointEngine):
        def __init__(self) -> None:
            self.name = "accelerate"
            self.zipfile_serialization = True

        def load(self, path: str, map_location: Any = None) -> Any:
            return read_file(path, map_location if map_location is not None else "cpu")

    before, engine.checkpoint_engine = engine.checkpoint_engine, Reader()
    try:
        yield
    finally:
        engine.checkpoint_engine = before
