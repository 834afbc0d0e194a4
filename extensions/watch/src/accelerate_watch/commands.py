"""`accelerate-core dump`: print where the ranks of a running job are."""

from __future__ import annotations

import time

import click

from accelerate_watch import run_folder, stacks

_WAIT = 30.0


@click.command("dump")
@click.argument("job", required=False)
def command(job: str | None) -> None:
    """Print where each rank of a running job is: its step, collective and stack.

    JOB is the process ID of the launcher, or of one of its ranks on this machine. Without it, the running
    jobs are listed.
    """
    jobs = run_folder.running()
    if job is None:
        if not jobs:
            click.echo("No job is running on this machine with accelerate-watch.")
        for launcher, ranks in jobs.items():
            shown = ", ".join(str(one["rank"]) for one in ranks)
            click.echo(f"{launcher}: {ranks[0]['script']}, ranks {shown}")
        return
    found = {
        launcher: ranks
        for launcher, ranks in jobs.items()
        if job in {str(launcher), *(str(one["pid"]) for one in ranks)}
    }
    if not found:
        listed = ", ".join(map(str, jobs)) or "none"
        raise click.ClickException(
            f"JOB={job!r} is neither the process ID of a launcher on this machine nor of one of its "
            f"ranks. Running jobs: {listed}."
        )
    launcher, ranks = found.popitem()
    try:
        folder = run_folder.folder_of(launcher)
    except FileNotFoundError as error:
        raise click.ClickException(f"The job has just ended: {error}.") from error
    before = set(folder.glob("report*.txt"))
    for one in ranks:
        try:
            stacks.request_report(folder, one["rank"])
        except FileNotFoundError:  # it has just ended
            continue
    until = time.monotonic() + _WAIT
    while time.monotonic() < until:
        new = set(folder.glob("report*.txt")) - before
        if new:
            click.echo(max(new, key=lambda file: file.stat().st_mtime).read_text(), nl=False)
            return
        time.sleep(0.1)
    pids = ", ".join(str(one["pid"]) for one in ranks)
    raise click.ClickException(
        f"No rank on this machine answered within {_WAIT:g} s. The processes are {pids}."
    )
