"""DeepSpeed's own config: read from any source, accessed by dotted names, and checked."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigurationError, did_you_mean, listing

#: The value for settings that should be derived from the run.
AUTO = "auto"

#: Why MS-AMP is not supported.
NO_MSAMP = (
    "is not supported: MS-AMP is no longer maintained and needs DeepSpeed 0.13, but this backend "
    "needs 0.19 or newer. Use mixed_precision='fp8' with torchao (AORecipeKwargs of "
    "accelerate-fp8), or 'bf16'."
)

#: The top-level keys that DeepSpeed reads. It silently ignores other keys.
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
    """Return a config as a dict, and a phrase that says where it comes from."""
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
            "hf_ds_config must be the path of a JSON file, a dict, JSON, base64-encoded JSON or an "
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
        # Try base64 before a path, because file systems reject long names with an error.
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
        f"The DeepSpeed config {text!r} is not an existing file, JSON, or base64-encoded JSON."
        f"{did_you_mean(path.name, near)}"
    )


def _parse(text: str, origin: str) -> tuple[dict[str, Any], str]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise ConfigurationError(
                    f"The DeepSpeed config {origin} has the key {key!r} twice."
                )
            made[key] = value
        return made

    try:
        config = json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"The DeepSpeed config {origin} is not valid JSON: {error.msg} in line {error.lineno}, "
            f"column {error.colno}."
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"The DeepSpeed config {origin} must be a JSON object, not a {type(config).__name__}."
        )
    return config, origin


class HfDeepSpeedConfig:
    """A DeepSpeed config with access by dotted names, compatible with Transformers' class.

    Args:
        config_file_or_dict: path of a JSON file, a dict, JSON as a string, base64-encoded JSON, or
            another `HfDeepSpeedConfig`.

    Raises:
        ConfigurationError: the config cannot be read, has a duplicate key, or has a key that
            DeepSpeed does not know.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        config, origin = _read(config_file_or_dict)
        self.config = config
        self.origin = origin
        #: Dotted name -> where a value that was filled in comes from.
        self.provenance: dict[str, str] = {}

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section that contains a dotted name, or None, and the last part of the name.

        Args:
            ds_key_long: a dotted name, such as `zero_optimization.stage`.

        Raises:
            ConfigurationError: a part of the name exists but is not an object.
        """
        *path, key = ds_key_long.split(".")
        section: Any = self.config
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
            if section is None:
                return None, key
        if not isinstance(section, dict):
            raise ConfigurationError(
                f"{'.'.join(path)} of {self.origin} must be an object, not {section!r}."
            )
        return section, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value by dotted name.

        Args:
            ds_key_long: a dotted name.
            default: returned if the config doesn't have the name.
        """
        section, key = self.find_config_node(ds_key_long)
        return default if section is None else section.get(key, default)

    def has(self, ds_key_long: str) -> bool:
        """Return whether the config has a name.

        Args:
            ds_key_long: a dotted name.
        """
        section, key = self.find_config_node(ds_key_long)
        return section is not None and key in section

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value is "auto".

        Args:
            ds_key_long: a dotted name.
        """
        return bool(self.get_value(ds_key_long) == AUTO)

    def set_value(self, ds_key_long: str, value: Any, source: str) -> None:
        """Set a value, and record where it comes from.

        Args:
            ds_key_long: a dotted name.
            source: where the value comes from.
        """
        *path, key = ds_key_long.split(".")
        section = self.config
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
        self.provenance[ds_key_long] = source

    def where(self, ds_key_long: str) -> str:
        """Return where a value comes from.

        Args:
            ds_key_long: a dotted name.
        """
        return self.provenance.get(ds_key_long, f"{ds_key_long} of {self.origin}")

    def shown(self, ds_key_long: str) -> str:
        """Return a value and where it comes from, as text for an error message.

        Args:
            ds_key_long: a dotted name.
        """
        return f"{ds_key_long}={self.get_value(ds_key_long)!r} ({self.where(ds_key_long)})"

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value or a section.

        Args:
            ds_key_long: a dotted name.

        Raises:
            ValueError: the config doesn't have the name, and `must_exist` is True.
        """
        section, key = self.find_config_node(ds_key_long)
        if section is not None and key in section:
            del section[key]
        elif must_exist:
            raise ValueError(f"{self.origin} has no {ds_key_long}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value exists and is true.

        Args:
            ds_key_long: a dotted name.
        """
        value = self.get_value(ds_key_long)
        return value != AUTO and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value exists and is false.

        Args:
            ds_key_long: a dotted name.
        """
        value = self.get_value(ds_key_long)
        return value is not None and not value

    @property
    def stage(self) -> int:
        """The ZeRO stage, or 0 if it is not set."""
        stage = self.get_value("zero_optimization.stage", 0)
        return 0 if stage == AUTO else int(stage)

    def is_zero2(self) -> bool:
        """Return whether the stage is 2."""
        return self.stage == 2

    def is_zero3(self) -> bool:
        """Return whether the stage is 3."""
        return self.stage == 3

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer state are offloaded."""
        kinds = ("offload_optimizer", "offload_param")
        devices = {self.get_value(f"zero_optimization.{kind}.device") for kind in kinds}
        return bool(devices & {"cpu", "nvme"})

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the dotted name and value of each entry that is not a section."""

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
        """Return a copy without values that `prepare` resolves, for models created before it."""
        config = HfDeepSpeedConfig(self)
        for name in (*config.autos(), "train_batch_size", "gradient_accumulation_steps"):
            config.del_config_sub_tree(name)
        config.config["train_micro_batch_size_per_gpu"] = 1  # required, but not used yet
        return config

    def choices(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Check that a value is one of `allowed`.

        Raises:
            ConfigurationError: it is not.
        """
        value = self.get_value(name)
        if value not in (None, AUTO) and value not in allowed:
            raise ConfigurationError(
                f"{self.shown(name)} is not a valid value. Allowed values are {listing(allowed)}."
                f"{did_you_mean(str(value), map(str, allowed))}"
            )
