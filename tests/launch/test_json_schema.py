"""The JSON schema of config files accepts and refuses the same keys as the launcher."""

from __future__ import annotations

import ast
import json
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


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Any:
    cls = jsonschema.validators.validator_for(schema)
    cls.check_schema(schema)
    return cls(schema)


def mistakes(validator: Any, text: str) -> list[str]:
    values = yaml.safe_load(text)
    return [f"{one.json_path}: {one.message[:200]}" for one in validator.iter_errors(values)]


def texts_of_tests(known: set[str]) -> dict[str, str]:
    """Return every string in the tests that is a config file which the launcher accepts."""
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            text = node.value
            if ":" not in text or len(text) > 5000 or text in files.WRONG_FILES:
                continue
            try:
                config = parse_config(text, Path("c.yaml"))
                if known & set(config):
                    decide({}, {"PATH": "/usr/bin"}, config)
                    found.setdefault(text, f"{path.name}:{node.lineno}")
            except AccelerateError:
                continue
    return {where: text for text, where in found.items()}


@pytest.mark.parametrize("template", files.TEMPLATES, ids=lambda path: path.stem)
def test_templates_are_valid(template: Path, validator: Any) -> None:
    assert mistakes(validator, template.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("version", files.EXPECTED)
def test_files_of_accelerate_are_valid(version: str, validator: Any) -> None:
    assert mistakes(validator, files.EXPECTED[version][0]) == []


@pytest.mark.parametrize("text", [files.FP8, files.FP8_LAUNCHED])
def test_files_with_fp8_are_valid(text: str, validator: Any) -> None:
    assert mistakes(validator, text) == []


def test_every_config_file_in_the_tests_is_valid(validator: Any, schema: dict[str, Any]) -> None:
    texts = texts_of_tests(set(schema["properties"]))
    assert len(texts) > 35
    found = {where: mistakes(validator, text) for where, text in texts.items()}
    assert {where: one for where, one in found.items() if one} == {}


#: Mistakes that the schema does not express: two values that contradict each other, or are out of range.
BEYOND = (
    "num_processes: 3\nnum_machines: 2",
    "num_machines: 2",
    "machine_rank: 1",
    "mpirun_config:\n  mpirun_hostfile: nowhere",
    "debug: true\ndebug: false",
    "gpu_ids: 0,0",
    "monitor_interval: 0",
    "monitor_interval: .nan",
    "tee: 7",
)


@pytest.mark.parametrize("text", files.WRONG_FILES, ids=lambda text: repr(text[:40]))
def test_wrong_files_are_refused(text: str, validator: Any) -> None:
    try:
        values = yaml.safe_load(text)
    except Exception:
        pytest.skip("not YAML")
    if text in BEYOND:
        assert mistakes(validator, text) == []
    else:
        assert list(validator.iter_errors(values)), values


@pytest.mark.parametrize("key", ["num_proceses", "mixed_precison", "fdsp_config"])
def test_misspelt_key_is_refused(key: str, validator: Any) -> None:
    (mistake,) = mistakes(validator, f"{key}: 1")
    assert f"{key!r} was unexpected" in mistake


@pytest.mark.usefixtures("counted_once")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(files.KEYS), files.VALUES, max_size=4))
def test_schema_accepts_what_the_launcher_accepts(validator: Any, values: dict[str, Any]) -> None:
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
