"""Compare the versions of installed distributions without importing them."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version as installed_version

from packaging.version import Version

from accelerate_core.plugin import ConfigurationError, listing
from accelerate_drop_in.constants import STR_OPERATION_TO_FUNC


def compare_versions(
    library_or_version: str | Version, operation: str, requirement_version: str
) -> bool:
    """Compare a version, or the version of an installed distribution, with another version.

    Args:
        library_or_version: the name of a distribution, or a version.
        operation: `>`, `>=`, `==`, `!=`, `<=` or `<`.
        requirement_version: the version to compare with.

    Raises:
        ConfigurationError: `operation` is invalid.
        importlib.metadata.PackageNotFoundError: the distribution is not installed.

    Example:
        from packaging.version import Version

        assert compare_versions(Version("2.9.1"), ">=", "2.8")
        assert compare_versions("torch", ">", "2.0")
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigurationError(
            f"operation={operation!r} must be one of {listing(STR_OPERATION_TO_FUNC)}."
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
    """Compare the release number of the installed torch, without suffixes such as `+cpu`.

    Args:
        operation: `>`, `>=`, `==`, `!=`, `<=` or `<`.
        version: the version to compare with.
    """
    return compare_versions(_torch_version(), operation, version)
