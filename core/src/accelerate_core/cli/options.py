"""Turn the launcher's table of options into click options, grouped in `--help`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from accelerate_core.errors import did_you_mean, listing
from accelerate_core.launch.options import LAUNCH_OPTIONS, LaunchOption

__all__ = ["GroupedCommand", "launch_options", "underscores"]

C = TypeVar("C", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option that stands under a heading."""

    def __init__(self, *args: Any, group: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command with options under headings in its help, and the nearest name in its errors."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for parameter in self.get_params(ctx) for name in parameter.opts]
            hint = did_you_mean(underscores(error.option_name), known)
            if any(parameter.name == "script" for parameter in self.get_params(ctx)):
                hint += " Options of the script itself stand after its name."
            raise click.UsageError(f"No such option: {error.option_name}.{hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def underscores(name: str) -> str:
    """Spell an option the one way: `num-processes` is `num_processes`."""
    return name.replace("-", "_")


def launch_options(function: C) -> C:
    """Decorate a click command with all options of `launch`; values not given are None."""
    for option in reversed(LAUNCH_OPTIONS):
        function = _decorate(option, function)
    config = click.option(
        "--config_file",
        cls=GroupedOption,
        group=LAUNCH_OPTIONS[0].group,
        metavar="FILE",
        help="YAML file with values for options that are not given",
    )
    return config(function)


def _decorate(option: LaunchOption, function: C) -> C:
    declaration = f"--{option.name}"
    if option.negatable:
        declaration += f"/--no_{option.name}"
    names = [declaration, *([option.short] if option.short else []), option.name]
    more: dict[str, Any] = {"type": _type(option)} if option.kind is not bool else {"is_flag": True}
    if option.kind is not bool:
        more["metavar"] = _metavar(option)
    if option.choices is not None:
        more["callback"] = _one_of(option.choices)
    return click.option(
        *names, cls=GroupedOption, group=option.group, help=option.help, default=None, **more
    )(function)


def _type(option: LaunchOption) -> Any:
    if option.kind is int:
        return click.IntRange(min=option.minimum)
    return option.kind


def _metavar(option: LaunchOption) -> str:
    if option.choices is not None:
        return "|".join(option.choices)
    return {int: "N", float: "SECONDS"}.get(option.kind, "TEXT")


def _one_of(choices: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def check(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value is not None and value not in choices:
            hint = did_you_mean(value, choices)
            raise click.BadParameter(f"{value!r} is not one of {listing(choices)}.{hint}")
        return value

    return check
