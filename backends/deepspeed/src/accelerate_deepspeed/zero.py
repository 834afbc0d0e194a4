"""Parameters in parts: made so from the start, and gathered for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from accelerate_core.errors import ConfigurationError, did_you_mean, listing
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.settings import DeepSpeedPlugin

__all__ = [
    "GatheredParameters",
    "gathered",
    "init_context",
    "mark_leaves",
    "switched_init",
    "tell_transformers",
]


def init_context(deepspeed: Any, plugin: DeepSpeedPlugin) -> AbstractContextManager[Any]:
    """Return `deepspeed.zero.Init` with the plugin's config, as far as it is known by now."""
    config = HfDeepSpeedConfig(plugin.hf_ds_config)
    for name in config.autos():
        config.del_config_sub_tree(name)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        config.del_config_sub_tree(name)
    config.config["train_micro_batch_size_per_gpu"] = 1
    context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config.config)
    return context


@contextmanager
def switched_init(plugin: DeepSpeedPlugin, enable: bool) -> Iterator[None]:
    """Have `zero3_init_flag` on or off inside of the block."""
    before = plugin.zero3_init_flag
    plugin.zero3_init_flag = enable
    tell_transformers(plugin)
    try:
        yield
    finally:
        plugin.zero3_init_flag = before
        tell_transformers(plugin)


def tell_transformers(plugin: DeepSpeedPlugin) -> None:
    """Let `from_pretrained` of Transformers shard what it loads, or stop it from doing so."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        return
    from transformers.integrations import deepspeed as theirs

    if plugin.is_zero3_init_enabled():
        theirs.set_hf_deepspeed_config(plugin.hf_ds_config)
    else:
        theirs.unset_hf_deepspeed_config()


def mark_leaves(deepspeed: Any, model: nn.Module, names: list[str]) -> None:
    """Make the modules of these classes units that are gathered whole, such as experts.

    Raises:
        ConfigurationError: the model has no module of such a class.
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    for name in names:
        if name not in classes:
            raise ConfigurationError(
                f"transformer_moe_cls_names has {name!r}, and {type(model).__name__} has no "
                f"module of that class; it has {listing(sorted(classes))}."
                f"{did_you_mean(name, classes)}"
            )
    if names:
        deepspeed.utils.set_z3_leaf_modules(model, [classes[name] for name in names])


def gathered(parameters: Any, modifier_rank: int | None = None) -> AbstractContextManager[Any]:
    """Return a context in which parameters that are in parts are whole."""
    one = [parameters] if hasattr(parameters, "shape") else list(parameters)
    if not any(hasattr(parameter, "ds_id") for parameter in one):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        one, modifier_rank=modifier_rank
    )
    return context


class GatheredParameters:
    """Have parameters whole inside of the block, whatever the stage; nothing where they are.

    Args:
        params: parameters, or one.
        modifier_rank: the rank whose changes the others get; None: they are not changed.
        fwd_module: as in deepspeed.
        enabled: False does nothing.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._context = gathered(params, modifier_rank) if enabled else nullcontext()

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
