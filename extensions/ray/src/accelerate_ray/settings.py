"""Where and how ranks run on a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from accelerate_core.plugin import ConfigurationError, option, settings


@settings(env_prefix="ACCELERATE_RAY_", section="ray_config")
class RaySettings:
    """Where and how ranks run on a Ray cluster."""

    address: str | None = option(
        default=None,
        env=("ACCELERATE_RAY_ADDRESS", "RAY_ADDRESS"),
        help="address of the cluster, or 'local' to start a cluster for this run; default: the "
        "cluster that runs on this machine",
    )
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = option(
        default="pack",
        help="whether to place ranks on few nodes (pack) or on many (spread); the strict forms "
        "require one node for all ranks, or one node for each",
    )
    cpus: float = option(default=1.0, help="CPUs to reserve for each rank", gt=0)
    gpus: int | None = option(
        default=None,
        help="GPUs to reserve for each rank, 0 or 1; default: 1 if the cluster has GPUs and the run "
        "is not on the CPU",
        ge=0,
        le=1,
    )
    resources: str = option(
        default="",
        help="other resources to reserve for each rank: name=amount,name=amount",
    )
    wait: float = option(
        default=600.0, help="seconds to wait for the cluster to have the resources", ge=0
    )
    join_wait: float = option(
        default=30.0,
        help="with a range of machines: seconds to wait for all of them before starting with fewer",
        ge=0,
    )
    files: Literal["auto", "ship", "shared"] = option(
        default="auto",
        help="'ship' copies the current directory to every node, 'shared' expects it there under the "
        "same path; auto: shared if all nodes are on this machine, else ship",
    )
    runtime_env: str = option(
        default="",
        help="Ray's runtime_env for the ranks: JSON, or a YAML or JSON file",
    )


def parse_resources(text: str) -> dict[str, float]:
    """Return the amounts in `name=amount,name=amount`.

    Raises:
        ConfigurationError: the text has another form, or an amount is not a positive number.
    """
    found: dict[str, float] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, amount = (part.strip() for part in pair.partition("="))
        try:
            number = float(amount)
        except ValueError:
            number = 0.0
        if not (name and equals and number > 0):
            raise ConfigurationError(
                f"ray_resources={text!r} must have the form name=amount,name=amount with positive "
                f"amounts; {pair!r} does not."
            )
        if name in ("CPU", "GPU"):
            raise ConfigurationError(
                f"ray_resources={text!r} sets {name}. Use --ray_{name.lower()}s instead."
            )
        found[name] = number
    return found


def parse_runtime_env(text: str) -> dict[str, Any]:
    """Return the mapping in a JSON text, or in a YAML or JSON file.

    Raises:
        ConfigurationError: the file can't be read, the text can't be parsed, or it is no mapping.
    """
    if not text:
        return {}
    import yaml  # its C extension is not needed to show the options

    is_json = text.lstrip().startswith("{")
    source = "ray_runtime_env" if is_json else f"ray_runtime_env file {text}"
    try:
        content = json.loads(text) if is_json else yaml.safe_load(Path(text).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"Cannot read {source}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{source} must be a mapping, such as {{pip: [scikit-learn]}}.")
    return content
