"""Options and config keys of Accelerate's launcher: whose they are, and which say nothing here.

Those of packages, planned ones too, are in `accelerate_core.plugins.catalog`; here stand those that
nobody will take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_core.plugins import catalog

_SAGEMAKER = (
    "Amazon SageMaker jobs are not started from here: name accelerate-core launch as the command "
    "of the job's container. Credentials do not belong on a command line."
)

#: Options that no plugin will take, with the reason.
REFUSED_OPTIONS = {
    "aws_access_key_id": _SAGEMAKER,
    "aws_secret_access_key": _SAGEMAKER,
    "use_xpu": "Hugging Face Accelerate dropped it, too; the device is found by torch.accelerator.",
    "ipex": "Hugging Face Accelerate dropped it, too; torch itself has what it added.",
}

#: Keys of older config files that say nothing today, with the reason.
OBSOLETE_KEYS = {
    "ipex_config": REFUSED_OPTIONS["ipex"],
    "use_xpu": REFUSED_OPTIONS["use_xpu"],
}

#: Keys that every file has and that say nothing here.
IGNORED_KEYS = {
    "main_training_function": "the script is run as a program, whatever its functions are called; "
    "the launcher tpu calls it",
    "same_network": "how machines reach each other follows from main_process_ip",
}


def said_by(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config file says, without the keys that say nothing."""
    return {k: config[k] for k in config if k not in (*OBSOLETE_KEYS, *IGNORED_KEYS)}


def owner_of_option(name: str) -> str | None:
    """Return the extra whose plugin has an option of that name, None for one we never heard of."""
    by_prefix = (extra for prefix, extra in catalog.PREFIXES.items() if name.startswith(prefix))
    return catalog.SWITCHES.get(name) or catalog.OPTIONS.get(name) or next(by_prefix, None)
