"""The table of the ways to start a run, in docs/clusters.md."""

from __future__ import annotations

import fcntl
import re
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- written by make engines -->", "<!-- end of the table -->"
_HEAD = (
    "| started with | ranks | first step after | a rank raises: exit status | a rank is killed | correct |\n"
    "|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Row:
    """One way to start a run, and what happened.

    Attributes:
        way: what started the run, the key of the row.
        first_step: seconds from the command to the first optimizer step.
        status: exit status if a rank raises an exception.
        resumed: who started the killed run again, and from which step it continued.
        correct: recognised test digits at the end of the run that was killed.
    """

    way: str
    ranks: int
    first_step: float | None
    status: int | str
    resumed: str
    correct: int | None

    def line(self) -> str:
        seconds = "-" if self.first_step is None else f"{self.first_step:.1f} s"
        correct = "-" if self.correct is None else f"{self.correct} of 359"
        cells = (self.way, self.ranks, seconds, self.status, self.resumed, correct)
        return f"| {' | '.join(map(str, cells))} |"


def write_table(rows: list[Row], page: Path) -> None:
    """Replace the rows of these ways in a page. Rows of other ways stay."""
    with page.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two sessions may write at the same time
        text = _replaced(file.read(), rows)
        file.seek(0)
        file.truncate()
        file.write(text)


def _replaced(text: str, rows: list[Row]) -> str:
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    lines = {_way(line): line for line in old.splitlines() if re.match(r"\| (?!started)", line)}
    lines |= {row.way: row.line() for row in rows}
    table = _HEAD + "\n".join(lines.values())
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _way(line: str) -> str:
    return line.split("|")[1].strip()
