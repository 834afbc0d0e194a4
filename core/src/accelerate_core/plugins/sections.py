"""Check the sections of a config file that belong to the compiler and to plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_core.config import lookup
from accelerate_core.config.files import ConfigFile
from accelerate_core.config.schema import settings_fields
from accelerate_core.errors import Mistakes, PluginError
from accelerate_core.plugins.discovery import disabled_names, installed


def add_section_mistakes(
    given: Mapping[str, Any], sources: lookup.Sources, mistakes: Mistakes
) -> None:
    """Collect the mistakes in these sections, so that one error lists all mistakes in a file.

    This imports plugins that are not active, so it is only called if there already is a mistake.

    Args:
        given: the arguments of the Accelerator.
        sources: environment and config file.
        mistakes: the mistakes found so far; more are added.
    """
    with mistakes:
        lookup.resolve_compiler(given, sources)
    config = sources.config
    if config is None:
        return
    for record in installed().plugins:
        if record.name in disabled_names(sources.environ):
            continue
        try:
            plugin = record.load()
        except PluginError:
            continue  # reported when something asks for it
        settings = getattr(plugin, "Settings", None)
        if settings is not None and _is_section(config, lookup.section_of(settings, record.name)):
            with mistakes:
                lookup.resolve_settings(settings, None, sources, owner=record.name)
        for more in getattr(plugin, "more_settings", ()):
            section = lookup.section_of(more, record.name)
            fields = (
                settings_fields(more, owner=record.name) if _is_section(config, section) else ()
            )
            for field in fields:
                with mistakes:
                    lookup.look_up(field, sources, section)


def _is_section(config: ConfigFile, section: str) -> bool:
    return section != "" and isinstance(config.get(section), dict)
