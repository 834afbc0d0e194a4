"""`python -m accelerate_xla.launch.run SCRIPT`: run SCRIPT in one process per TPU of this host."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_core.plugin import AccelerateError, ConfigurationError, did_you_mean
from accelerate_xla.launch import spawning


@dataclass(frozen=True)
class Program:
    """A script or module to run. It is pickled and sent to the processes.

    Args:
        function: the function to call, or None to run it as a program.
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    function: str | None = None

    def __call__(self) -> None:
        """Run the program in this process."""
        sys.argv = [self.name, *self.arguments]
        sys.path[0] = str(Path.cwd() if self.module else Path(self.name).resolve().parent)
        if self.function is not None:
            self._function()()
        elif self.module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")

    def _function(self) -> Any:
        if self.module:
            module = importlib.import_module(self.name)
        else:
            stem = Path(self.name).stem
            spec = importlib.util.spec_from_file_location(stem, self.name)
            if spec is None or spec.loader is None:
                raise ConfigurationError(f"{self.name} is not a Python file.")
            module = importlib.util.module_from_spec(spec)
            sys.modules[stem] = module  # pickle finds the module's classes under this name
            spec.loader.exec_module(module)
        found = getattr(module, str(self.function), None)
        if not callable(found):
            known = [name for name, value in vars(module).items() if callable(value)]
            raise ConfigurationError(
                f"main_training_function: {self.name} has no function {self.function!r}."
                f"{did_you_mean(str(self.function), known)} To run the file as a program, remove the "
                "option."
            )
        return found


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line and run the program."""
    parser = argparse.ArgumentParser("python -m accelerate_xla.launch.run", description=__doc__)
    parser.add_argument("--here", action="store_true", help="run in this process only")
    parser.add_argument("--num_processes", type=int, help="expected number of processes")
    parser.add_argument("--function", help="function of the script to call")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT names a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    program = Program(options.script, tuple(options.arguments), options.module, options.function)
    if options.here:
        program()
        return
    try:
        spawning.spawn(program, num_processes=options.num_processes)
    except spawning.RankFailedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.status)
    except AccelerateError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
