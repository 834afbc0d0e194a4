"""The JSON schema of config files accepts and refuses the same keys as the launcher."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import test_config_files as files
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelerate_core.config.files import parse_config
from accelerate_core.errors import AccelerateError
from accelerate_launch.cli import cli
from accelerate_launch.json_schema import config_schema
from accelerate_launch.planning import decide

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return config_schema()


class Quiet:
    """A validator whose representation does not fill the screen when a test fails."""

    def __init__(self, schema: dict[str, Any]) -> None:
        cls = jsonschema.validators.validator_for(schema)
        cls.check_schema(schema)
        self.iter_errors = cls(schema).iter_errors


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Quiet:
    return Quiet(schema)


def mistakes(validator: Quiet, text: str) -> list[str]:
    values = json.loads(json.dumps(yaml.safe_load(text), default=str))  # JSON has no dates
    return [f"{one.json_path}: {one.message[:200]}" for one in validator.iter_errors(values)]


def texts_of_tests(known: set[str]) -> dict[str, str]:
    """Return every string in the tests that is a config file which the launcher accepts."""
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            text = node.value
            if not known & set(re.findall(r"^(\w+):", text, re.MULTILINE)) or text in found:
                continue
            try:
                decide({}, {"PATH": "/usr/bin"}, parse_config(text, Path("c.yaml")))
            except AccelerateError:
                continue
            found[text] = f"{path.name}:{node.lineno}"
    return {where: text for text, where in found.items()}


@pytest.mark.parametrize("template", files.TEMPLATES, ids=lambda path: path.stem)
def test_templates_are_valid(template: Path, validator: Quiet) -> None:
    assert mistakes(validator, template.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("version", files.EXPECTED)
def test_files_of_accelerate_are_valid(version: str, validator: Quiet) -> None:
    assert mistakes(validator, files.EXPECTED[version][0]) == []


@pytest.mark.parametrize("text", [files.FP8, files.FP8_LAUNCHED])
def test_files_with_fp8_are_valid(text: str, validator: Quiet) -> None:
    assert mistakes(validator, text) == []


def test_every_config_file_in_the_tests_is_valid(validator: Quiet, schema: dict[str, Any]) -> None:
    texts = texts_of_tests(set(schema["properties"]))
    assert len(texts) > 35
    found = {where: mistakes(validator, text) for where, text in texts.items()}
    assert {where: one for where, one in found.items() if one} == {}


#: Mistakes that the schema does not express: two values that contradict each other, or are out of range.
BEYOND = (
    "num_processes: 3\nnum_machines: 2",
    "num_machines: 2",
    "num_machines: 2:1",
    "machine_rank: 1",
    "mpirun_config:\n  mpirun_hostfile: nowhere",
    "debug: true\ndebug: false",
    "gpu_ids: 0,0",
    "monitor_interval: 0",
    "monitor_interval: .nan",
    "tee: 7",
)


@pytest.mark.parametrize("text", files.WRONG_FILES, ids=lambda text: repr(text[:40]))
def test_wrong_files_are_refused(text: str, validator: Quiet) -> None:
    try:
        values = yaml.safe_load(text[:500])
    except Exception:
        pytest.skip("not YAML")
    if text in BEYOND:
        assert mistakes(validator, text) == []
    else:
        assert list(validator.iter_errors(values)), values


@pytest.mark.parametrize("key", ["num_proceses", "mixed_precison", "fdsp_config"])
def test_misspelt_key_is_refused(key: str, validator: Quiet) -> None:
    (mistake,) = mistakes(validator, f"{key}: 1")
    assert f"{key!r} was unexpected" in mistake


@pytest.mark.usefixtures("counted_once")
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(files.KEYS), files.VALUES, max_size=4))
def test_schema_accepts_what_the_launcher_accepts(validator: Quiet, values: dict[str, Any]) -> None:
    # The launcher ignores empty lists and mappings, which older files have in place of sections.
    values = {key: value for key, value in values.items() if value not in ([], {})}
    text = yaml.safe_dump(values, allow_unicode=True)
    try:
        decide({}, {"PATH": "/usr/bin"}, parse_config(text, Path("c.yaml")))
    except AccelerateError:
        return
    assert mistakes(validator, text) == []


counted_once = files.counted_once


def test_command_prints_the_schema(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli, ["config", "schema"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["properties"].keys() == schema["properties"].keys()
