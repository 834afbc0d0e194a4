"""Start processes from the command line, a notebook or a test.

`make_plan` decides what to run and why. A launcher turns the plan into a command, and `start` runs
it. `notebook_launcher` and `debug_launcher` start a function instead. Nothing here imports torch
until a function is launched. A launcher plugin needs `LaunchPlan`, `Target` and `target_command`.

Names are imported on first use, because each process imports `accelerate_launch.uncaught` when it starts.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_launch.notebook import PrepareForLaunch, debug_launcher, notebook_launcher
    from accelerate_launch.paths import default_config_path
    from accelerate_launch.plan import PREEMPTED, LaunchPlan, Target
    from accelerate_launch.planning import make_plan
    from accelerate_launch.simple import target_command
    from accelerate_launch.starting import (
        FunctionLauncher,
        Launcher,
        child_environment,
        choose_launcher,
        start,
    )
    from accelerate_launch.yaml_text import as_yaml

__all__ = [
    "PREEMPTED",
    "FunctionLauncher",
    "LaunchPlan",
    "Launcher",
    "PrepareForLaunch",
    "Target",
    "as_yaml",
    "child_environment",
    "choose_launcher",
    "debug_launcher",
    "default_config_path",
    "make_plan",
    "notebook_launcher",
    "start",
    "target_command",
]

#: Modules that define these names.
_MODULES = ("plan", "paths", "yaml_text", "simple", "starting", "planning", "notebook")


if not TYPE_CHECKING:  # type checkers would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for module in _MODULES:
                found = importlib.import_module(f"{__name__}.{module}")
                if hasattr(found, name):
                    globals()[name] = getattr(found, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
