"""DeepSpeed's own config: read from anywhere, looked up by dotted names, checked."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigurationError, did_you_mean, listing

#: The value that means "as the run needs it".
AUTO = "auto"

#: Why MS-AMP is not run from here.
NO_MSAMP = (
    "is not offered: MS-AMP is not maintained any more, and needs DeepSpeed 0.13, where this backend "
    "runs 0.19 and later. Use mixed_precision='fp8' with torchao (AORecipeKwargs of accelerate-fp8), "
    "or 'bf16'."
)

#: What DeepSpeed reads at the top of a config. It ignores other keys without a word.
KNOWN_KEYS = {
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint",
    "comet", "comms_logger", "communication_data_type", "compile", "compression_training",
    "csv_monitor", "curriculum_learning", "data_efficiency", "data_types",
    "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc",
    "dump_state", "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "fp16",
    "fp32_allreduce", "gradient_accumulation_dtype", "gradient_accumulation_steps",
    "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor",
    "graph_harvesting", "hybrid_engine", "load_from_fp32_weights", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "nebula", "optimizer", "pipeline",
    "prescale_gradients", "progressive_layer_drop", "quantize_training", "scheduler",
    "seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients",
    "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast",
    "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism",
    "use_node_local_storage", "vocabulary_size", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
}  # fmt: skip


def _read(given: Any) -> tuple[dict[str, Any], str]:
    """Return a config as a dict, and a phrase that says where it is from."""
    if isinstance(given, Mapping):
        config = copy.deepcopy(dict(given))
        origin = "the config dict"
    elif hasattr(given, "config") and isinstance(given.config, Mapping):
        config = copy.deepcopy(dict(given.config))
        origin = str(getattr(given, "origin", f"the {type(given).__name__}"))
    elif isinstance(given, str | os.PathLike):
        config, origin = _read_text(os.fspath(given))
    else:
        raise ConfigurationError(
            "hf_ds_config takes the path of a JSON file, a dict, JSON, base64 of JSON or an "
            f"HfDeepSpeedConfig, not {type(given).__name__}."
        )
    for key in config:
        if key == "msamp":
            raise ConfigurationError(f"msamp (in {origin}) {NO_MSAMP}")
        if key not in KNOWN_KEYS:
            raise ConfigurationError(
                f"DeepSpeed has no setting {key!r} (in {origin}).{did_you_mean(str(key), KNOWN_KEYS)}"
            )
    return config, origin


def _read_text(text: str) -> tuple[dict[str, Any], str]:
    if text.lstrip().startswith("{"):
        return _parse(text, "the JSON text")
    try:
        # Before the path: a long text is no name that a file system looks up.
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except ValueError:
        decoded = ""
    if decoded.lstrip().startswith("{"):
        return _parse(decoded, "the base64 text")
    path = Path(text).expanduser()
    try:
        if path.exists():
            return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The DeepSpeed config {text} cannot be read: {error}.") from None
    folder = path.parent if path.parent.is_dir() else Path()
    near = [other.name for other in folder.glob("*.json")]
    raise ConfigurationError(
        f"The DeepSpeed config {text!r} is no file, no JSON and no base64 of JSON."
        f"{did_you_mean(path.name, near)}"
    )


def _parse(text: str, origin: str) -> tuple[dict[str, Any], str]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise ConfigurationError(f"The DeepSpeed config {origin} has {key!r} twice.")
            made[key] = value
        return made

    try:
        config = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"The DeepSpeed config {origin} is no JSON: {error.msg} in line {error.lineno}, "
            f"column {error.colno}."
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"The DeepSpeed config {origin} is a {type(config).__name__}; a JSON object is needed."
        )
    return config, origin


class HfDeepSpeedConfig:
    """A DeepSpeed config that is asked by dotted names, as Transformers and its users do.

    Args:
        config_file_or_dict: path of a JSON file, a dict, JSON as a text, base64 of JSON, or another
            `HfDeepSpeedConfig`.

    Raises:
        ConfigurationError: it is none of these, no JSON, has a key twice, or a key that DeepSpeed
            does not have.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        config, origin = _read(config_file_or_dict)
        self.config = config
        self.origin = origin
        #: Where values that were filled in came from, by dotted name.
        self.provenance: dict[str, str] = {}

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section a dotted name lies in, None if there is none, and its last part.

        Args:
            ds_key_long: a dotted name, such as `zero_optimization.stage`.

        Raises:
            ConfigurationError: a part of the name is there and is no object.
        """
        *path, key = ds_key_long.split(".")
        section: Any = self.config
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
            if section is None:
                return None, key
        if not isinstance(section, dict):
            raise ConfigurationError(
                f"{'.'.join(path)} of {self.origin} is {section!r}; it takes an object."
            )
        return section, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value by dotted name.

        Args:
            ds_key_long: a dotted name.
            default: returned where it is missing.
        """
        section, key = self.find_config_node(ds_key_long)
        return default if section is None else section.get(key, default)

    def has(self, ds_key_long: str) -> bool:
        """Tell whether a name is there.

        Args:
            ds_key_long: a dotted name.
        """
        section, key = self.find_config_node(ds_key_long)
        return section is not None and key in section

    def is_auto(self, ds_key_long: str) -> bool:
        """Tell whether a value is left to us.

        Args:
            ds_key_long: a dotted name.
        """
        return bool(self.get_value(ds_key_long) == AUTO)

    def set_value(self, ds_key_long: str, value: Any, source: str) -> None:
        """Set a value, with its origin.

        Args:
            ds_key_long: a dotted name.
            source: where the value is from.
        """
        *path, key = ds_key_long.split(".")
        section = self.config
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
        self.provenance[ds_key_long] = source

    def where(self, ds_key_long: str) -> str:
        """Say where a value comes from.

        Args:
            ds_key_long: a dotted name.
        """
        return self.provenance.get(ds_key_long, f"{ds_key_long} of {self.origin}")

    def shown(self, ds_key_long: str) -> str:
        """Say what a value is and where it comes from.

        Args:
            ds_key_long: a dotted name.
        """
        return f"{ds_key_long}={self.get_value(ds_key_long)!r} ({self.where(ds_key_long)})"

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value or a section.

        Args:
            ds_key_long: a dotted name.

        Raises:
            ValueError: with `must_exist`, if it is not there.
        """
        section, key = self.find_config_node(ds_key_long)
        if section is not None and key in section:
            del section[key]
        elif must_exist:
            raise ValueError(f"There is no {ds_key_long} in {self.origin}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Tell whether a value is there and true; a missing one is not.

        Args:
            ds_key_long: a dotted name.
        """
        value = self.get_value(ds_key_long)
        return value != AUTO and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Tell whether a value is there and false; a missing one is not.

        Args:
            ds_key_long: a dotted name.
        """
        value = self.get_value(ds_key_long)
        return value is not None and not value

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 if there is none."""
        stage = self.get_value("zero_optimization.stage", 0)
        return 0 if stage == AUTO else int(stage)

    def is_zero2(self) -> bool:
        """Tell whether this is stage 2."""
        return self.stage == 2

    def is_zero3(self) -> bool:
        """Tell whether this is stage 3."""
        return self.stage == 3

    def is_offload(self) -> bool:
        """Tell whether parameters or optimizer state are kept off the device."""
        kinds = ("offload_optimizer", "offload_param")
        devices = {self.get_value(f"zero_optimization.{kind}.device") for kind in kinds}
        return bool(devices & {"cpu", "nvme"})

    def values(self) -> Iterator[tuple[str, Any]]:
        """Iterate over the dotted names and the values that are no sections."""

        def walk(node: Any, name: str) -> Iterator[tuple[str, Any]]:
            if not isinstance(node, dict) or not node:
                yield name, node
                return
            for key, value in node.items():
                yield from walk(value, f"{name}.{key}" if name else str(key))

        return walk(self.config, "")

    def autos(self) -> list[str]:
        """Return the dotted names that are still "auto"."""
        return [name for name, value in self.values() if value == AUTO]

    def known_by_now(self) -> HfDeepSpeedConfig:
        """Return a copy without what only `prepare` resolves, for models that are made before it."""
        config = HfDeepSpeedConfig(self)
        for name in (*config.autos(), "train_batch_size", "gradient_accumulation_steps"):
            config.del_config_sub_tree(name)
        config.config["train_micro_batch_size_per_gpu"] = 1  # of no matter yet
        return config

    def choices(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Check a value against what is allowed.

        Raises:
            ConfigurationError: it is something else.
        """
        value = self.get_value(name)
        if value not in (None, AUTO) and value not in allowed:
            raise ConfigurationError(
                f"{self.shown(name)} is not known; allowed are {listing(allowed)}."
                f"{did_you_mean(str(value), map(str, allowed))}"
            )
