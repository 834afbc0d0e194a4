"""What counts as yes and as no, wherever a text says it."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate_core.errors import ConfigurationError, did_you_mean, listing

ON = ("yes", "true", "on", "y", "t", "1")
OFF = ("no", "false", "off", "n", "f", "0")


def truth(value: object) -> bool | None:
    """Read a yes or no in any case; None: it is neither."""
    text = str(value).strip().lower()
    return True if text in ON else False if text in OFF else None


def switch(value: object, shown: str) -> bool:
    """Return a yes or no; `shown` is value and source, for the error.

    Raises:
        ConfigurationError: it is neither, with what is allowed.
    """
    said = truth(value)
    if said is None:
        allowed = ON + OFF
        raise ConfigurationError(
            f"{shown} is not a switch; allowed are {listing(allowed)}."
            f"{did_you_mean(str(value).lower(), allowed)}"
        )
    return said


def flag(environ: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Return a variable's yes or no; `default` where it is not set or empty.

    Raises:
        ConfigurationError: it is set to something else.
    """
    text = environ.get(name, "")
    return switch(text, f"Environment variable {name}={text!r}") if text else default
