"""`accelerate-core plugins hooks`."""

from __future__ import annotations

import json

import click

from accelerate_core.builtin.console import console


@click.command("hooks")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(name: str | None, as_json: bool) -> None:
    """Print the contract: every hook a plugin may implement, or the one called NAME.

    With --json and no NAME also the public names of the classes plugins are made of.
    """
    from rich.table import Table
    from rich.text import Text

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
    out = console()
    out.print(f"Version {'.'.join(map(str, made['version']))} of the contract.")
    for kind, meaning in HOOK_KINDS.items():
        mine = {hook: its for hook, its in hooks.items() if its["kind"] == kind}
        if not mine:
            continue
        table = Table("hook", "since", "when it is called, what it returns")
        table.title, table.title_justify = f"{kind}: {meaning}", "left"
        for hook, its in mine.items():
            doc = its["doc"] + "".join(f"\n{key} is deprecated." for key in its["deprecated"])
            shown = Text(f"{hook}({', '.join(its['arguments'])})", overflow="fold")
            table.add_row(shown, ".".join(map(str, its["since"])), Text(doc, overflow="fold"))
        out.print(table)
