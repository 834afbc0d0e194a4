"""The result of a check, and writing results as JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree


class Skip(Exception):
    """Raised by a check that does not apply; the text is the reason."""


@dataclass
class Result:
    """The result of one check.

    Attributes:
        detail: what the check observed, or why it was skipped.
        error: the failure in a few lines: the rank, the expected value, and the hook.
        trace: the traceback of the first rank that failed.
    """

    name: str
    state: Literal["passed", "failed", "skipped"]
    detail: str = ""
    error: str = ""
    trace: str = ""
    seconds: float = 0.0


#: Checks that load the plugin.
_LOADING = ("imports", "metadata", "api_version")
#: The first check that creates an Accelerator, in one process.
CREATES = "attributes"


def prevents_others(name: str, state: str, error: str) -> bool:
    """Return whether all later checks would fail in the same way as this one.

    This is so if the plugin cannot be loaded, or if it refuses every Accelerator because something that
    it needs is not configured, such as the address of a server.
    """
    kind = error.split(":")[0]
    if state != "failed":
        return False
    return (name in _LOADING and "Error" in kind) or (
        name == CREATES and kind == "ConfigurationError"
    )


def write_junit(path: str | Path, label: str, results: Sequence[Result]) -> None:
    """Write the results as one test suite of JUnit XML.

    Args:
        label: the plugin, as `name (distribution version)`.
    """
    states = [result.state for result in results]
    whole = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        whole,
        "testsuite",
        name=f"accelerate-core plugins check {label}",
        tests=str(len(results)),
        failures=str(states.count("failed")),
        errors="0",
        skipped=str(states.count("skipped")),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=label, name=result.name, time=f"{result.seconds:.3f}"
        )
        if result.state == "failed":
            failure = ElementTree.SubElement(case, "failure", message=_plain(result.error))
            failure.text = _plain(result.trace or result.error)
        elif result.state == "skipped":
            ElementTree.SubElement(case, "skipped", message=_plain(result.detail))
        elif result.detail:
            ElementTree.SubElement(case, "system-out").text = _plain(result.detail)
    ElementTree.indent(whole)
    ElementTree.ElementTree(whole).write(path, encoding="utf-8", xml_declaration=True)


#: https://www.w3.org/TR/xml/#charsets
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _plain(text: str) -> str:
    """Replace the characters that XML cannot represent."""
    return _NOT_XML.sub("?", text)
