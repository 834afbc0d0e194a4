"""Start processes from the command line, a notebook or a test.

`make_plan` decides what to run and why. A launcher turns the plan into a command, and `start` runs
it. `notebook_launcher` and `debug_launcher` start a function instead. Nothing here imports torch
until a function is launched. A launcher plugin needs `LaunchPlan`, `Target` and `target_command`.
"""

from accelerate_launch.notebook import PrepareForLaunch, debug_launcher, notebook_launcher
from accelerate_launch.paths import default_config_path
from accelerate_launch.plan import PREEMPTED, LaunchPlan, Target
from accelerate_launch.planning import make_plan
from accelerate_launch.simple import target_command
from accelerate_launch.start import (
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
