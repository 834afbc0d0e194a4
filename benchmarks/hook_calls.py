"""Cost of calling a hook with our own code and with pluggy's call mechanism.

    python benchmarks/hook_calls.py [--json results.json]

Each row is a hook of one kind with a number of plugins that implement it. Both mechanisms fulfil the
contract: an implementation gets the arguments that it names, its exceptions get a note with hook, plugin
and version, and a stage hook passes the model on. With pluggy, this needs a wrapper per plugin for the
note, and a loop over callers of single plugins for a stage. `pluggy, bare` leaves out both.

The table shows the Python calls per call of the hook, without the implementations, and the time, which is
the best of several repeats. Times vary between machines. Calls don't, and ratios hardly do.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pluggy

from accelerate_core.backend import Backend
from accelerate_core.contract.hooks import PROJECT, HookSpecs, hookimpl
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.plugins.factory import attributed
from accelerate_core.plugins.manager import ActivePlugins, SharedHooks

REPEATS, NUMBER = 7, 20_000


class Plugin:
    """Implements a hook of each kind, with a subset of its arguments."""

    @hookimpl
    def on_step_end(self, optimizer: Any) -> None:
        pass

    @hookimpl
    def classify(self, obj: Any) -> None:
        pass

    @hookimpl
    def convert(self, model: Any) -> Any:
        return model


class Model:
    def named_parameters(self) -> None:
        pass


class Accelerator:
    """Supports weak references."""


def records(count: int) -> list[PluginRecord]:
    return [PluginRecord("extension", f"p{index}", "", "bench", "1.0") for index in range(count)]


def ours(accelerator: Any, count: int) -> SharedHooks:
    plugins = ActivePlugins({"backend": Backend})
    for record in records(count):
        plugins.add(Plugin(), record, "measured")
    return SharedHooks(plugins, accelerator)


def with_pluggy(count: int, noted: bool) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    for record in records(count):
        plugin = Plugin()
        if noted:
            for name in ("on_step_end", "classify", "convert"):
                method = getattr(plugin, name)
                noted_method = functools.wraps(method)(attributed(method, name, record))
                setattr(plugin, name, noted_method)
        manager.register(plugin, name=record.name)
    return manager


def python_calls(function: Callable[[], Any]) -> int:
    calls = 0
    own = {Plugin.on_step_end.__code__, Plugin.classify.__code__, Plugin.convert.__code__}
    own |= {function.__code__, Model.named_parameters.__code__}

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code not in own

    sys.setprofile(note)
    function()
    sys.setprofile(None)
    return calls


def nanoseconds(function: Callable[[], Any]) -> float:
    return min(timeit.repeat(function, repeat=REPEATS, number=NUMBER)) / NUMBER * 1e9


def ways(count: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return hook -> name of the mechanism -> function that calls the hook."""
    accelerator = Accelerator()
    optimizer = object()
    model = Model()
    shared = ours(accelerator, count)
    listeners = shared.implementations("on_step_end")

    def step_listeners() -> None:
        for one in listeners:
            shared.call(one, optimizer=optimizer)

    found: dict[str, dict[str, Callable[[], Any]]] = {
        "on_step_end (broadcast)": {"ours": step_listeners},
        "classify (registration)": {"ours": lambda: shared.call_each("classify", obj=model)},
        "convert (stage)": {"ours": lambda: shared.run_stage("convert", model)},
    }
    for name, noted in (("pluggy", True), ("pluggy, bare", False)):
        manager = with_pluggy(count, noted)
        hook = manager.hook
        every = manager.get_plugins()
        single = [
            manager.subset_hook_caller("convert", [other for other in every if other is not one])
            for one in every
        ]

        def stage(single: list[Any] = single, hook: Any = hook, noted: bool = noted) -> Any:
            if not noted:
                return hook.convert(accelerator=accelerator, model=model)
            made = model
            for caller in single:
                (made,) = caller(accelerator=accelerator, model=made)
            return made

        found["on_step_end (broadcast)"][name] = lambda hook=hook: hook.on_step_end(
            accelerator=accelerator, optimizer=optimizer
        )
        found["classify (registration)"][name] = lambda hook=hook: hook.classify(
            accelerator=accelerator, obj=model
        )
        found["convert (stage)"][name] = stage
    found["(keep alive)"] = {"": lambda: accelerator}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"pluggy {pluggy.__version__}, Python {sys.version.split()[0]}")
    print(f"{'hook':26}{'plugins':>8}{'way':>15}{'calls':>7}{'ns':>8}{'ratio':>7}")
    for count in (0, 1, 3):
        for hook, callers in ways(count).items():
            if hook.startswith("("):
                continue
            base = nanoseconds(callers["ours"])
            for way, call in callers.items():
                time = base if way == "ours" else nanoseconds(call)
                row = {"hook": hook, "plugins": count, "way": way, "calls": python_calls(call)}
                rows.append({**row, "ns": round(time), "ratio": round(time / base, 2)})
                print(
                    f"{hook:26}{count:>8}{way:>15}{row['calls']:>7}{time:>8.0f}{time / base:>7.2f}"
                )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
