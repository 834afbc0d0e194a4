"""Comparing versions of installed distributions without importing them."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version as installed_version

from packaging.version import Version

from accelerate_core.errors import ConfigurationError, listing
from accelerate_drop_in.constants import STR_OPERATION_TO_FUNC


def compare_versions(
    library_or_version: str | Version, operation: str, requirement_version: str
) -> bool:
    """Compare a version, or that of an installed distribution, with another.

    Args:
        library_or_version: name of a distribution, or a version.
        requirement_version: what it is compared with.

    Raises:
        ConfigurationError: `operation` is none of `> >= == != <= <`.
        importlib.metadata.PackageNotFoundError: there is no such distribution.

    Example:
        from packaging.version import Version

        assert compare_versions(Version("2.9.1"), ">=", "2.8")
        assert compare_versions("torch", ">", "2.0")
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigurationError(
            f"{operation!r} does not compare versions; allowed: {listing(STR_OPERATION_TO_FUNC)}."
        )
    if isinstance(library_or_version, str):
        library_or_version = Version(installed_version(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](library_or_version, Version(requirement_version))


@lru_cache(maxsize=1)
def _torch_version() -> Version:
    return Version(Version(installed_version("torch")).base_version)


def __getattr__(name: str) -> Version:
    if name == "torch_version":
        return _torch_version()
    raise AttributeError(name)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch (its release number, without `+cpu` and the like).

    Args:
        operation: `>`, `>=`, `==`, `!=`, `<=` or `<`.
        version: what it is compared with.
    """
    return compare_versions(_torch_version(), operation, version)
