"""`accelerate-core plugins hooks`."""

from __future__ import annotations

import json

import click

from accelerate_launch.commands.tables import print_table


@click.command("hooks")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(name: str | None, as_json: bool) -> None:
    """Print the contract: the hooks of plugins, or the one called NAME.

    With --json and no NAME also the public names of the classes plugins are made of.
    """
    from accelerate_core.errors import ConfigurationError, did_you_mean
    from accelerate_testing.contract import HOOK_KINDS, contract

    made = contract()
    hooks = made["hooks"]
    if name is not None:
        if name not in hooks:
            raise ConfigurationError(
                f"The contract has no hook {name!r}.{did_you_mean(name, hooks)}"
            )
        hooks = {name: hooks[name]}
        made = {"version": made["version"], "hooks": hooks}
    if as_json:
        click.echo(json.dumps(made, indent=2))
        return
    click.echo(f"Version {'.'.join(map(str, made['version']))} of the contract.")
    for kind, meaning in HOOK_KINDS.items():
        mine = {hook: its for hook, its in hooks.items() if its["kind"] == kind}
        if not mine:
            continue
        rows = (
            (
                f"{hook}({', '.join(its['arguments'])})",
                ".".join(map(str, its["since"])),
                its["doc"] + "".join(f"\n{key} is deprecated." for key in its["deprecated"]),
            )
            for hook, its in mine.items()
        )
        columns = ("hook", "since", "when it is called, what it returns")
        print_table(columns, rows, title=f"{kind}: {meaning}")
