"""Checkpoints of engines, written with DeepSpeed's own code into the directory of `save_state`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate_core.plugin import (
    AcceleratorView,
    CheckpointError,
    ConfigurationError,
    did_you_mean,
    is_count,
    key_matcher,
    listing,
    match_keys,
    parse_json,
    read_limited,
)
from accelerate_deepspeed.checkpoint_files import beside_the_optimizer, check_file, read_file
from accelerate_deepspeed.zero import GatheredParameters

_SAVE_OPTIONS = ("exclude_frozen_parameters",)
_LOAD_OPTIONS = ("strict", "load_module_strict", "load_optimizer_states", "load_module_only")
_NOTE = "engines.json"
_WRITE_ERRORS = (OSError, RuntimeError)  # torch.save raises RuntimeError for a full disk


def _engines(accelerator: AcceleratorView) -> Sequence[Any]:
    """Return the prepared models. Those with an engine are engines, which are untyped."""
    return accelerator.models


def whole_state(accelerator: AcceleratorView, model: Any) -> dict[str, Any]:
    """Return a model's whole state dict. With stage 3, it is empty on all ranks but rank 0."""
    partitioned = getattr(model, "zero_optimization_partition_weights", None)
    if partitioned is not None and partitioned():
        # Despite its name, it returns the parameters in their own dtype.
        return dict(model._zero3_consolidated_16bit_state_dict() or {})
    return dict(accelerator.unwrap_model(model).state_dict())


def save(accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]) -> None:
    """Write engines with `save_checkpoint`, and other models as tensors.

    A rank that fails to write raises the error after all ranks have finished, so that none hangs.
    """
    _known("save_state", options, _SAVE_OPTIONS)
    if accelerator.is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    entries: list[dict[str, Any]] = []
    failure: BaseException | None = None
    for index, model in enumerate(_engines(accelerator)):
        entries.append({"engine": _trains(model)})
        if not _trains(model):
            state = whole_state(accelerator, model)
            if accelerator.is_main_process:
                try:
                    torch.save(state, directory / f"model_{index}.pt")
                except _WRITE_ERRORS as error:
                    failure = failure or error
            continue
        with _checkpoint_engine(model) as files:
            model.save_checkpoint(
                str(directory), tag=f"engine_{index}", client_state={}, save_latest=False, **options
            )
        failure = failure or files.failure
        entries[-1] |= _layout(model)
    if failure is not None:
        raise failure
    if accelerator.is_main_process:
        (directory / _NOTE).write_text(json.dumps({"models": entries}, indent=1))


def load(accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]) -> None:
    """Read what `save` wrote, through the universal format if the number of ranks differs."""
    _known("load_state", options, _LOAD_OPTIONS)
    try:
        entries = list(parse_json(read_limited(directory / _NOTE))["models"])
        if not all(_is_entry(entry) for entry in entries):
            raise ValueError("'models' must list whether an engine trained each, and its layout")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory} was not saved with DeepSpeed: {_NOTE} cannot be read ({error})."
        ) from None
    if len(entries) != len(_engines(accelerator)):
        raise CheckpointError(
            f"{directory} has {len(entries)} models, but {len(_engines(accelerator))} are prepared."
        )
    names = {"load_optimizer_states", "load_module_only"} & options.keys()
    strict = bool(options.get("load_module_strict", options.get("strict", True)))
    arguments = {name: options[name] for name in names} | {"load_module_strict": strict}
    for index, (model, saved) in enumerate(zip(_engines(accelerator), entries, strict=True)):
        trains = _trains(model)
        if trains != saved["engine"]:
            was, now = ("was not", "is") if trains else ("was", "is not")
            raise CheckpointError(
                f"Model {index} of {directory} {was} trained by a DeepSpeed engine when it was "
                f"saved, but {now} now. Prepare it in the same way as before."
            )
        if not trains:
            _load_plain(accelerator, model, read_file(directory / f"model_{index}.pt"), strict)
            continue
        tag = f"engine_{index}"
        for path in sorted((directory / tag).glob("*.pt")):
            check_file(path)
        here = _layout(model)
        if here["stage"] == saved["stage"] == 0 or here.items() <= saved.items():
            _load_engine(model, directory, tag, arguments)
        else:
            module = accelerator.unwrap_model(model)
            with _universal(accelerator, directory, tag, here, saved, module) as folder:
                model._config.load_universal_checkpoint = True
                try:
                    _load_engine(model, folder, tag, arguments)
                finally:
                    model._config.load_universal_checkpoint = False
                # The universal format only contains parameters that the optimizer has.
                others = beside_the_optimizer(directory / tag)
                _load_others(accelerator, model, match_keys(others, module.state_dict().keys()))


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("engine"), bool):
        return False
    layout = ("stage", "data_ranks", "model_ranks") if entry["engine"] else ()
    return all(is_count(entry.get(name)) for name in layout)


def _trains(model: Any) -> bool:
    return hasattr(model, "accelerate_trained")


def _layout(engine: Any) -> dict[str, int]:
    """Return the values that must be equal to load an engine's files without conversion."""
    return {
        "stage": int(engine.zero_optimization_stage()),
        "data_ranks": int(engine.dp_world_size),
        "model_ranks": int(engine.mp_world_size),
    }


def _known(what: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"{what}({name}=...) is not supported with DeepSpeed. It supports {listing(known)}."
                f"{did_you_mean(name, known)}"
            )


def _load_plain(accelerator: AcceleratorView, model: Any, state: Any, strict: bool) -> None:
    module = accelerator.unwrap_model(model)
    parameters = list(module.parameters())
    with GatheredParameters(parameters, modifier_rank=0):
        module.load_state_dict(state, strict=strict)  # on all ranks, because each has its buffers


@torch.no_grad()
def _load_others(
    accelerator: AcceleratorView, model: Any, state: Mapping[str, torch.Tensor]
) -> None:
    module = accelerator.unwrap_model(model)
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name].reshape(buffer.shape))
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad and n in state}
    with GatheredParameters(frozen.values(), modifier_rank=0):
        for name, parameter in frozen.items():
            if parameter.numel():
                parameter.copy_(state[name].reshape(parameter.shape))


def _load_engine(engine: Any, directory: Path, tag: str, arguments: Mapping[str, Any]) -> None:
    with _checkpoint_engine(engine, engine.module):
        path, _ = engine.load_checkpoint(str(directory), tag=tag, **arguments)
    if path is None:
        raise CheckpointError(f"DeepSpeed did not find the checkpoint {directory / tag}.")


@contextmanager
def _universal(
    accelerator: AcceleratorView,
    directory: Path,
    tag: str,
    here: Mapping[str, int],
    saved: Mapping[str, int],
    module: torch.nn.Module,
) -> Iterator[Path]:
    """A context in which a temporary copy of the checkpoint exists in the universal format.

    Args:
        here, saved: the layouts of this engine and of the one that saved the checkpoint.
        module: the engine's module, which names the parameters.

    Raises:
        CheckpointError: the stages are not compatible, or the conversion failed.
    """
    stages = (saved["stage"], here["stage"])
    if stages[0] != stages[1] and not set(stages) <= {1, 2}:
        raise CheckpointError(
            f"{directory.parent} was saved with ZeRO stage {stages[0]} on {saved['data_ranks']} "
            f"ranks, and cannot be loaded with stage {stages[1]} on {here['data_ranks']} ranks. Use "
            "the same stage (1 and 2 are compatible), or only load its weights after running "
            "accelerate-core deepspeed consolidate."
        )
    accelerator.warn_once(
        f"{directory.parent} was saved on {saved['data_ranks']} ranks with stage {saved['stage']}. "
        "It will be converted to DeepSpeed's universal format before it is loaded."
    )
    checkpoint = directory.parent
    token = accelerator.communicator.broadcast_object(secrets.token_hex(4))
    folder = checkpoint.parent / f".{checkpoint.name}.universal-{token}"
    failure: str | None = None
    if accelerator.is_main_process:
        try:
            to_universal(directory / tag, folder / tag)
            _rename_folders(folder / tag / "zero", module)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    failure = accelerator.communicator.broadcast_object(failure)
    try:
        if failure is not None:
            raise CheckpointError(
                f"{checkpoint} could not be converted to DeepSpeed's universal format: {failure}"
            )
        yield folder
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


def _rename_folders(zero: Path, module: torch.nn.Module) -> None:
    """Rename the folders of parameters to the names of this run, see `_renamed`."""
    match = key_matcher([name for name, _ in module.named_parameters(remove_duplicate=False)])
    for folder in list(zero.iterdir()) if zero.is_dir() else ():
        if match(folder.name) != folder.name:
            folder.rename(zero / match(folder.name))


def to_universal(source: Path, target: Path, workers: int = 1) -> None:
    """Convert an engine's files to DeepSpeed's universal format, which any number of ranks can load.

    Raises:
        CheckpointError: the checkpoint has stage 0, or is damaged.
    """
    for path in sorted(source.glob("*.pt")):
        check_file(path)
    if not list(source.glob("*_optim_states.pt")):
        raise CheckpointError(
            f"{source} has no *_optim_states.pt, so it was saved with stage 0. It doesn't need to be "
            "converted, because any number of ranks can load it."
        )
    from deepspeed.checkpoint import ds_to_universal

    target.mkdir(parents=True)
    output = io.StringIO()
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(output):
        ds_to_universal.main(arguments)


def _renamed(state: Any, module: torch.nn.Module) -> Any:
    """Give the weights in an engine's file the names that they have in a module.

    Names in older checkpoints contain `_orig_mod` for modules that were compiled before `prepare`.
    """
    if not isinstance(state, dict):
        return state
    names = module.state_dict().keys()
    match = key_matcher(names)
    for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
        if isinstance(state.get(key), dict):
            state[key] = type(state[key])(match_keys(state[key], names))
    if isinstance(state.get("buffer_names"), list):
        state["buffer_names"] = [match(name) for name in state["buffer_names"]]
    return state


@contextmanager
def _checkpoint_engine(engine: Any, module: torch.nn.Module | None = None) -> Iterator[Any]:
    """A context in which an engine reads and writes files safely.

    If writing fails, the error is kept until the end, so that no other rank hangs. Reading only
    unpickles classes on the allow-list.

    Args:
        module: the module to load, for checkpoints in which its weights have other names.
    """
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Files(TorchCheckpointEngine):
        failure: BaseException | None = None

        def __init__(self) -> None:
            self.name = "accelerate"
            self.zipfile_serialization = True

        def makedirs(self, path: Any, exist_ok: bool = False) -> None:
            self._try(lambda: Path(path).mkdir(parents=True, exist_ok=exist_ok))

        def save(self, state_dict: Any, path: str) -> None:
            self._try(lambda: torch.save(state_dict, path))

        def _try(self, act: Callable[[], None]) -> None:
            try:
                act()
            except _WRITE_ERRORS as error:
                self.failure = self.failure or error

        def load(self, path: str, map_location: Any = None) -> Any:
            state = read_file(path, "cpu" if map_location is None else map_location)
            return state if module is None else _renamed(state, module)

    before = engine.checkpoint_engine
    engine.checkpoint_engine = Files()
    try:
        yield engine.checkpoint_engine
    finally:
        engine.checkpoint_engine = before
