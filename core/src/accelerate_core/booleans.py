"""Parse booleans from the environment, config files and options."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate_core.errors import ConfigurationError, did_you_mean, listing

ON = ("yes", "true", "on", "y", "t", "1")
OFF = ("no", "false", "off", "n", "f", "0")


def parse_bool(value: object) -> bool | None:
    """Parse a boolean word, ignoring case; return None for anything else."""
    text = str(value).strip().lower()
    if text in ON:
        return True
    return False if text in OFF else None


def require_bool(value: object, shown: str) -> bool:
    """Parse a boolean word, or raise an error that starts with `shown`, the value and its source.

    Raises:
        ConfigurationError: the value is not a boolean word.
    """
    parsed = parse_bool(value)
    if parsed is None:
        allowed = ON + OFF
        raise ConfigurationError(
            f"{shown} is not a boolean; allowed values are {listing(allowed)}."
            f"{did_you_mean(str(value).lower(), allowed)}"
        )
    return parsed


def env_flag(environ: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Return the boolean value of an environment variable, or `default` if it is unset or empty.

    Raises:
        ConfigurationError: it is set to anything else.
    """
    text = environ.get(name, "")
    return require_bool(text, f"Environment variable {name}={text!r}") if text else default
