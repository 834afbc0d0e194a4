"""Turn the launcher's options into click options, grouped in `--help`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from accelerate_core.config.lookup import converted
from accelerate_core.plugin import (
    AccelerateError,
    ConfigurationError,
    SettingField,
    did_you_mean,
    installed,
    parse_bool,
)
from accelerate_launch.contributed import Contributed, contributed_options, refuse_unknown
from accelerate_launch.options import DEPRECATED, LAUNCH_OPTIONS, NAMES_PLUGIN, TRAINING

C = TypeVar("C", bound=Callable[..., Any])

#: The key in a context's `meta` for the arguments of a `GroupedCommand` as they were typed.
TYPED = "accelerate_launch.typed"


class GroupedOption(click.Option):
    """An option that the help shows under a heading."""

    def __init__(self, *args: Any, group: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class PluginOption(GroupedOption):
    """An option from a plugin. A boolean one may be given alone or with `true` or `false`."""

    def __init__(self, contributed: Contributed) -> None:
        field, schema = contributed.field, contributed.schema
        self.takes_switch = not contributed.switch and (
            field.kind == "bool" or field.choices == ("true", "false")
        )
        more: dict[str, Any] = {"is_flag": True}
        if not contributed.switch:
            more = {"metavar": _metavar(field), "multiple": field.kind == "list"}
        group = f"{schema.kind} {schema.name}".replace("core ", "").capitalize()
        default = "" if field.default in (None, "") else f"; default: {str(field.default).lower()}"
        super().__init__(
            [*(f"--{name}" for name in field.cli), "value"],
            group=f"{group} ({schema.release})",
            help=f"{field.help}{_unsaid(field)}{default}",
            default=None,
            hidden=field.help.startswith(DEPRECATED),
            shell_complete=_complete_value(field),
            **more,
        )
        self.name = contributed.key

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = self.opts
        self.opts = shown[:1]  # the other names are only accepted for other versions
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = shown


class GroupedCommand(click.Command):
    """A command with grouped options in its help and suggestions for misspelt options.

    The options of plugins are looked up only for the help, or when an option is unknown.
    """

    _contributed: list[click.Parameter] | None = None

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Pairs of a purpose and the arguments for it.
        self.examples = examples

    def contributed(self) -> list[click.Parameter]:
        """Return the options of the installed plugins."""
        if self._contributed is None:
            self._contributed = [PluginOption(one) for one in contributed_options(os.environ)]
        return self._contributed

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *(self._contributed or [])]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for completion, where click ignores unknown options
            known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
            options = [word.partition("=")[0] for word in args if word.startswith("--")]
            if any(f"--{underscores(name[2:])}" not in known for name in options):
                self.contributed()
        ctx.meta.setdefault(TYPED, list(args))
        try:
            return super().parse_args(ctx, self._with_switches(ctx, list(args)))
        except click.NoSuchOption as error:
            if self._contributed is not None:
                raise self._refusal(ctx, error.option_name) from None
            self.contributed()
            return self.parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete options, including those of plugins."""
        if ctx.params.get("script"):  # everything that follows belongs to the script
            return complete_file(ctx, None, incomplete)
        if incomplete.startswith("-"):
            self.contributed()
        return super().shell_complete(ctx, incomplete)

    def _refusal(self, ctx: click.Context, spelt: str) -> click.UsageError:
        name = underscores(spelt).lstrip("_")
        known = [option for parameter in self.get_params(ctx) for option in parameter.opts]
        try:
            refuse_unknown(name, known)
        except AccelerateError as error:
            return click.UsageError(str(error), ctx)
        hint = did_you_mean(f"--{name}", known)
        if any(parameter.name == "script" for parameter in self.get_params(ctx)):
            hint += " Options for the script itself go after its name."
        return click.UsageError(f"No such option: {spelt}.{hint}", ctx)

    def _with_switches(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add `true` to boolean plugin options without a value, up to the script's name."""
        if not self._contributed:
            return args
        by_name = {
            name: option
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        made = []
        rest = list(args)
        while rest and rest[0].startswith("-") and rest[0] != "--":
            word = rest.pop(0)
            made.append(word)
            spelt = f"--{underscores(word[2:])}" if word.startswith("--") else word
            option = by_name.get(spelt)
            if option is None or option.is_flag:
                continue
            switch = isinstance(option, PluginOption) and option.takes_switch
            if switch and (not rest or parse_bool(rest[0]) is None):
                made[-1] = f"{word}=true"
            elif rest:
                made.append(rest.pop(0))
        return [*made, *rest]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.contributed()
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        groups["Other"] = groups.pop("Other")
        if self.examples:
            self._format_examples(ctx, formatter)
            with formatter.section("Groups of options, in this order"):
                formatter.write_text("; ".join(name.partition(" (")[0] for name in groups))
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def _format_examples(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for purpose, arguments in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}# {purpose}\n")
                width = formatter.width - formatter.current_indent
                words = f"{ctx.command_path} {arguments}"
                lines = textwrap.wrap(words, width - 2, break_on_hyphens=False)
                for number, line in enumerate(lines):
                    continued = "    " if number else ""
                    more = " \\" if number < len(lines) - 1 else ""
                    formatter.write(f"{'':>{formatter.current_indent}}{continued}{line}{more}\n")


def underscores(name: str) -> str:
    """Spell an option with underscores: `num-processes` becomes `num_processes`."""
    return name.replace("-", "_")


#: The context settings of every command that has the options of `launch`.
CONTEXT = {"token_normalize_func": underscores, "max_content_width": 100}


def launch_options(function: C) -> C:
    """Decorate a click command with all options of `launch`. Options not given are None."""
    for option in reversed(LAUNCH_OPTIONS):
        function = _decorate(option, function)
    config = click.option(
        "--config_file",
        cls=GroupedOption,
        group=LAUNCH_OPTIONS[0].group,
        metavar="FILE",
        help="YAML file with values for options that are not on the command line",
        shell_complete=complete_file,
    )
    return config(function)


def _decorate(option: SettingField, function: C) -> C:
    declaration = f"--{option.name}"
    more: dict[str, Any] = {"is_flag": True}
    if option.kind == "bool" and option.group == TRAINING:
        declaration += f"/--no_{option.name}"
    elif option.kind != "bool":
        bounds: dict[str, Any] = {"min": option.minimum, "max": option.maximum}
        whole = click.IntRange(**bounds)
        more = {"type": {"int": whole, "float": float}.get(option.kind, str)}
        more["metavar"] = _metavar(option)
    if option.choices is not None:
        more["callback"] = _one_of(option)
    letters = [f"-{name}" for name in option.cli if len(name) == 1]
    return click.option(
        *(declaration, *letters, option.name),
        **{
            "cls": GroupedOption,
            "group": option.group,
            "help": option.help,
            "default": None,
            "shell_complete": _complete_value(option),
            **more,
        },
    )(function)


def complete_file(
    ctx: click.Context, parameter: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]


def _complete_value(
    field: SettingField,
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a function that completes a choice, or the name of an installed plugin."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        names = field.choices or ()
        if field.name in NAMES_PLUGIN:
            names = tuple(one.name for one in installed().of_kind(NAMES_PLUGIN[field.name]))
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


#: If the joined choices are longer than this, they go into the help text, which is wrapped.
_LONG = 32


def _metavar(option: SettingField) -> str:
    if option.choices:
        joined = "|".join(option.choices)
        return joined if len(joined) <= _LONG else "NAME"
    if option.name == "num_machines":
        return "N|MIN:MAX"
    return {"bool": "true|false", "int": "N", "float": "X"}.get(option.kind, "TEXT")


def _unsaid(option: SettingField) -> str:
    """Return a text with the choices that neither the placeholder nor the help lists."""
    if _metavar(option) != "NAME":
        return ""
    choices = option.choices or ()
    missing = [one for one in choices if one not in option.help]
    between = ": " if len(missing) == len(choices) else "; also "
    return between + ", ".join(missing) if missing else ""


def _one_of(option: SettingField) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def check(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else converted(option, value, repr(value))
        except ConfigurationError as error:
            raise click.BadParameter(str(error)) from None

    return check
