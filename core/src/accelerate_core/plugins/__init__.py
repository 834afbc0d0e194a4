"""Discovery, triggers, selection, and the manager of one Accelerator's plugins. No torch here."""

from accelerate_core.plugins.discovery import PluginRecord, find, installed
from accelerate_core.plugins.manager import ActivePlugins, Hooks
from accelerate_core.plugins.selection import Claim, Request, Selection, select_backend

__all__ = [
    "ActivePlugins",
    "Claim",
    "Hooks",
    "PluginRecord",
    "Request",
    "Selection",
    "find",
    "installed",
    "select_backend",
]
