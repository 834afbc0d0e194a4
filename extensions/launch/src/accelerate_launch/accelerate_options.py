"""Options and config keys of Accelerate's launcher that no package here uses.

Those that a package uses, including planned packages, are in `accelerate_core.plugins.catalog`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_core.plugins import catalog

_SAGEMAKER = (
    "Amazon SageMaker jobs cannot be started from here: use accelerate-core launch as the command of "
    "the job's container. Don't pass credentials on a command line."
)

#: Options that no plugin accepts, with the reason.
REFUSED_OPTIONS = {
    "aws_access_key_id": _SAGEMAKER,
    "aws_secret_access_key": _SAGEMAKER,
    "use_xpu": "Hugging Face Accelerate removed it, too. torch.accelerator finds the device.",
    "ipex": "Hugging Face Accelerate removed it, too. torch now includes its features.",
}

#: Obsolete keys of older config files, with the reason.
OBSOLETE_KEYS = {
    "ipex_config": REFUSED_OPTIONS["ipex"],
    "use_xpu": REFUSED_OPTIONS["use_xpu"],
}

#: Keys that every file of Accelerate has and that have no effect here, with the reason.
IGNORED_KEYS = {
    "main_training_function": "the script runs as a program, so it needs no function name; only the "
    "launcher tpu uses it",
    "same_network": "main_process_ip decides how machines reach each other",
}


def effective_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config file without the keys that have no effect."""
    return {k: config[k] for k in config if k not in (*OBSOLETE_KEYS, *IGNORED_KEYS)}


def owner_of_option(name: str) -> str | None:
    """Return the extra of the plugin that has this option, None if the option is unknown."""
    by_prefix = (extra for prefix, extra in catalog.PREFIXES.items() if name.startswith(prefix))
    return catalog.SWITCHES.get(name) or catalog.OPTIONS.get(name) or next(by_prefix, None)
