"""`accelerate-core plugins new NAME --kind KIND`."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("new")
@click.argument("name")
@click.option(
    "--kind", required=True, metavar="KIND",
    help="The kind of plugin: backend, precision, tracker, launcher or extension.",
)  # fmt: skip
@click.option("--directory", metavar="DIR", help="The new directory; accelerate-NAME by default.")
def command(name: str, kind: str, directory: str | None) -> None:
    """Write a complete repository for a new plugin NAME.

    It has a working class, settings, tests that run the conformance suite, a README and CI. It passes
    its own tests without a change.
    """
    from accelerate_testing.scaffold import write_repository

    made = write_repository(name, kind, Path(directory) if directory else None)
    root = os.path.commonpath(made)
    click.echo(f"{len(made)} files in {root}:")
    for path in made:
        click.echo(f"  {path.relative_to(root)}")
    click.echo(
        f"\nNext:\n  cd {root}\n  pip install -e '.[test]'\n  accelerate-core plugins check {name}\n"
        "  pytest"
    )
