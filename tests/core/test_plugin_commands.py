"""The text and JSON output of `accelerate-core plugins`, `plugins why` and `plugins hooks`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dummies
import pool
import pytest
from support import clean_environment

TRACKER = """
from accelerate_tracking import GeneralTracker
class T(GeneralTracker):
    name = "diary"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "no-such-library>=2"
    tracker = None
"""


#: A precision whose base class explains which of several libraries it uses.
ENGINES = """
from accelerate_core import Precision
from accelerate_core.errors import ConfigurationError
class Chooses(Precision):
    api_version = (1, 0)
    @classmethod
    def explain_choice(cls, sources):
        engine = sources.environ.get("ENGINE") or (sources.config or {}).get("debug")
        if engine == "none":
            raise ConfigurationError("ENGINE=none")
        return f"engine {engine}"
class Fast(Chooses):
    name = "fast"
"""

#: A checkpointer is only imported when it is created.
CHECKPOINTERS = "class Late:\n    api_version = (2, 0)\nclass Sound:\n    api_version = (1, 0)\n"
CHESTS = {"absent": "Absent", "late": "Late", "sound": "Sound"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("installed")
    dummies.backend(root, "left", triggers=("USE_LEFT",), priority=70)
    dummies.backend(root, "right", triggers=("USE_RIGHT",), priority=60)
    dummies.backend(root, "tied", triggers=("USE_TIED",), priority=70)
    dummies.backend(root, "future", api="(2, 0)")
    dummies.backend(root, "picky", extra="    supports = {'accepts': ()}\n")
    dummies.distribution(root, "gone", "x = 1", {"backends": {"gone": "Gone"}})
    dummies.distribution(root, "lost", "x = 1", {"launchers": {"lost": "Nowhere"}})
    dummies.distribution(root, "verb", "x = 1", {"commands": {"verb": "x"}})
    dummies.distribution(root, "plus", "x = 1", {"extensions": {"plus": "x"}})
    dummies.distribution(root, "chest", CHECKPOINTERS, {"checkpointers": CHESTS})
    dummies.distribution(root, "engines", ENGINES, {"precisions": {"fast": "Fast"}})
    crash = {"checkpointers": {"crash": "C"}}
    dummies.distribution(root, "crash", "raise OSError('no such disk')", crash)
    dummies.distribution(root, "diary", TRACKER, {"trackers": {"diary": "T"}})
    for number in (1, 2):
        dummies.distribution(
            root, f"twin{number}", "B = 1", {"backends": {"twin": "B"}}, version=f"{number}.5"
        )
    # Similar to no name, to a precision ("no"), to a backend ("ddp"), and an unrelated library.
    requires = "Requires-Dist: accelerate-core>=0.1\n"
    for name, more in {
        "accelerate-forgot": requires,
        "accelerate-noep": requires,
        "accelerate-ddq": "",
        "lefft": "",
    }.items():
        bare = root / f"{name.replace('-', '_')}-0.3.dist-info"
        bare.mkdir()
        (bare / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n{more}")
    return root


def plugins(root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = clean_environment(**environ)
    env["PYTHONPATH"] = f"{root}:{env['PYTHONPATH']}"
    return pool.run(["-m", "accelerate_core", "plugins", *arguments], env, 60)


def table(root: Path, **environ: str) -> dict[str, dict[str, str]]:
    done = plugins(root, "--json", **environ)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_table_shows_kind_version_state_and_reason(root: Path) -> None:
    rows = table(root, USE_LEFT="1", USE_RIGHT="1", ACCELERATE_DISABLED_PLUGINS="fp16")
    assert rows["left"] == {
        "kind": "backend",
        "name": "left",
        "distribution": "dummy-left",
        "version": "1.0",
        "api_version": "1.0",
        "state": "active",
        "reason": "left wants it",
    }
    shown = {name: (row["state"], row["reason"]) for name, row in rows.items()}
    assert shown["right"] == ("passed over", "right wants it, priority 60")
    assert shown["single"] == ("available", "not requested")
    assert shown["fp16"] == ("disabled", "ACCELERATE_DISABLED_PLUGINS")
    refused = "written for contract version 2.0, but this core supports 1.0"
    assert shown["future"] == ("refused", refused)
    assert shown["gone"][0] == shown["lost"][0] == "broken"
    assert "dummy_gone:Gone" in shown["gone"][1]
    assert shown["diary"][0] == "passed over"
    assert "no-such-library" in shown["diary"][1]


def test_table_can_show_a_single_kind(root: Path) -> None:
    rows = json.loads(plugins(root, "--kind", "precision", "--json").stdout)
    assert {row["kind"] for row in rows} == {"precision"}
    wrong = plugins(root, "--kind", "precison")
    assert wrong.returncode == 2
    assert "Did you mean 'precision'?" in wrong.stderr


def decision(root: Path, name: str, *more: str, **environ: str) -> dict[str, Any]:
    done = plugins(root, "why", name, "--json", *more, **environ)
    assert done.returncode in (0, 1), done.stderr
    made = json.loads(done.stdout)[0]
    assert done.returncode == bool(made["problem"])
    made["steps"] = dict(made["steps"])
    return made


def test_why_reports_the_active_compiler(root: Path) -> None:
    made = decision(root, "torch_compile", ACCELERATE_DYNAMO_BACKEND="eager")
    assert (made["state"], made["reason"]) == ("active", "the compiler 'eager' is requested")
    assert decision(root, "torch_compile", ACCELERATE_DYNAMO_BACKEND="no")["state"] == "available"


def test_why_explains_the_choices_of_a_plugin(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("debug: true\nmixed_precision: fast\n")
    made = decision(root, "fast", "--config_file", str(file))
    assert (made["state"], made["steps"]["its own choice"]) == ("active", "engine True")
    assert decision(root, "fast", ENGINE="a")["steps"]["its own choice"] == "engine a"
    assert not decision(root, "fast", ENGINE="none")["problem"]  # nobody asks for it
    made = decision(root, "fast", "--config_file", str(file), ENGINE="none")
    assert made["problem"] == "ENGINE=none"
    assert made["steps"]["its own choice"] == "failed: ENGINE=none"
    file.write_text("mixed_precision: fp8\nfp8_config:\n  backend: te\n")
    output = plugins(root, "why", "fp8", "--config_file", str(file)).stdout
    assert "engine TE: " in output
    assert "c.yaml line 3" in output.replace("\n", "")
    made = decision(root, "fp8", ACCELERATE_FP8_BACKEND="MSAMP")
    choice = "engine MSAMP: environment variable ACCELERATE_FP8_BACKEND"
    assert made["steps"]["its own choice"] == choice
    assert "its own choice" not in decision(root, "left")["steps"]


def test_why_lists_triggers_claims_and_rivals(root: Path) -> None:
    right = decision(root, "right", USE_LEFT="1", USE_RIGHT="1")
    assert right["state"] == "passed over"
    assert right["steps"]["trigger USE_RIGHT"] == "matches: environment variable USE_RIGHT=1"
    assert right["steps"]["candidate left"] == "active: left wants it"
    assert "ACCELERATE_BACKEND=right" in right["advice"]
    quiet = decision(root, "right")
    assert quiet["steps"]["trigger USE_RIGHT"] == "does not match"
    assert quiet["steps"]["chosen"].startswith("single (accelerate-core")
    tie = decision(root, "left", USE_LEFT="1", USE_TIED="1")
    assert "equal priority 70" in tie["steps"]["selection"]
    assert "tied (dummy-tied 1.0)" in tie["steps"]["selection"]
    assert (tie["state"], "equal priority 70" in tie["reason"]) == ("undecided", True)


def test_why_uses_the_config_file_and_the_number_of_processes(root: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("backend: right\nmixed_precision: bf16\n")
    named = decision(root, "right", "--config_file", str(config))
    assert (named["state"], named["reason"]) == ("active", f"{config} line 1")
    half = decision(root, "bf16", "--config_file", str(config))
    assert (half["state"], half["reason"]) == ("active", f"{config} line 2")
    two = decision(root, "ddp", "--num_processes", "2")
    assert (two["state"], two["reason"]) == ("active", "2 processes")


LAUNCHER = """
class L:
    name = "{name}"
    api_version = (1, 0)
    def accepts(self, plan): return plan.num_machines == 1
    def launch_command(self, plan): return ["echo", "{name} starts", str(plan.num_processes)]
"""


@pytest.mark.parametrize("key", ["launcher", "trigger", "neither"])
def test_table_and_why_agree_with_launch_for_the_same_file(tmp_path: Path, key: str) -> None:
    for name in ("rope", "tape"):
        groups = {"launchers": {name: "L"}, "triggers": {name.upper(): "L"}}
        dummies.distribution(tmp_path, name, LAUNCHER.format(name=name), groups)
    config = tmp_path / "config.yaml"
    config.write_text("num_processes: 2\nuse_cpu: true\n" + "launcher: rope" * (key == "launcher"))
    environ = {"ROPE": "1"} if key == "trigger" else {}
    script = tmp_path / "script.py"
    # One write per line, because print() writes an unbuffered line in two parts, and both share a pipe.
    script.write_text(
        "import sys\nfrom accelerate_core import Accelerator\n"
        "sys.stdout.write(Accelerator().backend.name + '\\n')\n"
    )
    env = clean_environment(**environ)
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "accelerate_core", "launch", "--config_file", str(config)]
    done = subprocess.run(
        [*command, str(script)], env=env, capture_output=True, text=True, timeout=120
    )
    file = ("--config_file", str(config))
    rows = json.loads(plugins(tmp_path, "--json", *file, **environ).stdout)
    active = {row["kind"]: row["name"] for row in rows if row["state"] == "active"}
    assert (active["backend"], active["precision"]) == ("ddp", "no")
    ddp = decision(tmp_path, "ddp", *file, **environ)
    assert (ddp["state"], ddp["steps"]["processes"]) == ("active", f"2, {config} line 1")
    starter = "torchrun" if key == "neither" else "rope"
    assert active["launcher"] == starter
    expected = ["ddp", "ddp"] if key == "neither" else ["rope starts 2"]
    # Gloo in older versions of torch also writes to stdout.
    assert [line for line in done.stdout.splitlines() if "peer ranks" not in line] == expected, (
        done.stderr
    )
    rope = decision(tmp_path, "rope", *file, **environ)
    reason = {
        "launcher": f"{config} line 3",
        "trigger": "requested by environment variable ROPE",
    }
    expected = ("active", reason[key]) if key in reason else ("available", "not requested")
    assert (rope["state"], rope["reason"]) == expected


@pytest.mark.parametrize(
    ("environ", "expected", "undecided"),
    [
        (
            {"ACCELERATE_BACKEND": "nosuch"},
            "No backend plugin is named 'nosuch'",
            {"backend", "launcher"},
        ),
        ({"ACCELERATE_MIXED_PRECISION": "bf61"}, "Did you mean 'bf16'", {"precision", "launcher"}),
        ({"ACCELERATE_PLUGINS": "nosuch"}, "No extension plugin is named 'nosuch'", {"extension"}),
        ({"WORLD_SIZE": "2"}, "part of a world of 2", {"launcher"}),
        ({"USE_LEFT": "1", "USE_TIED": "1"}, "equal priority 70", {"backend"}),
    ],
)
def test_invalid_environment_is_reported_and_selection_stays_undecided(
    root: Path, environ: dict[str, str], expected: str, undecided: set[str]
) -> None:
    done = plugins(root, "--json", **environ)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert expected in done.stderr
    rows = json.loads(done.stdout)
    assert {row["kind"] for row in rows if row["state"] == "undecided"} == undecided
    assert all(expected in row["reason"] for row in rows if row["state"] == "undecided")
    assert not any(row["kind"] in undecided and row["state"] == "available" for row in rows)


def test_tie_is_reported_once_with_correct_plurals(root: Path) -> None:
    done = plugins(root, USE_LEFT="1", USE_TIED="1")
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("equal priority 70") == 1
    assert "see the error below" in done.stdout
    assert "accepts 1 process on 1 machine" in " ".join(done.stdout.split())


def test_world_size_that_is_not_a_number_is_an_error(root: Path) -> None:
    for more in ((), ("why", "left")):
        done = plugins(root, *more, WORLD_SIZE="abc")
        assert done.returncode == 2
        assert "WORLD_SIZE='abc' must be a number" in done.stderr


def test_config_file_that_launch_refuses_leaves_selection_undecided(
    root: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("num_procesess: 2\n")
    done = plugins(root, "--json", "--config_file", str(config))
    assert done.returncode == 1
    assert "Did you mean 'num_processes'?" in done.stderr
    assert not any(row["state"] == "active" for row in json.loads(done.stdout))
    left = decision(root, "left", "--config_file", str(config))
    assert left["state"] == "undecided"
    assert "Unknown key 'num_procesess'" in left["reason"]


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"USE_LEFT": "1", "USE_TIED": "1"}, ("left", "tied", "right", "gone", "bf16")),
        ({"ACCELERATE_PLUGINS": "pluss"}, ("plus", "left")),
        ({"ACCELERATE_BACKEND": "twin"}, ("twin", "left", "future")),
        ({"ACCELERATE_BACKEND": "future"}, ("future", "left")),
        ({"ACCELERATE_MIXED_PRECISION": "bf61"}, ("bf16", "lost")),
    ],
)
def test_why_agrees_with_the_table(
    root: Path, environ: dict[str, str], names: tuple[str, ...]
) -> None:
    done = plugins(root, "--json", **environ)
    assert done.returncode == 1
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    made = {name: decision(root, name, **environ) for name in names}
    for name, reported in made.items():
        assert (reported["state"], reported["reason"]) == (
            rows[name]["state"],
            rows[name]["reason"],
        )
    first = made[names[0]]
    assert first["problem"] in done.stderr
    assert first["state"] == ("refused" if names[0] == "future" else "undecided")


@pytest.mark.parametrize(
    ("name", "state", "expected"),
    [
        ("absent", "broken", "module 'dummy_chest' has no attribute 'Absent'"),
        ("late", "refused", "contract version 2.0"),
        ("crash", "broken", "OSError: no such disk"),
        ("sound", "active", "environment variable ACCELERATE_CHECKPOINTER"),
    ],
)
def test_plugin_that_cannot_be_created_is_reported_as_broken(
    root: Path, name: str, state: str, expected: str
) -> None:
    environ = {"ACCELERATE_CHECKPOINTER": name}
    made = decision(root, name, **environ)
    assert made["state"] == state
    assert made["steps"].get("decision", state).startswith(state)
    assert expected in made["reason"]
    broken = state != "active"
    assert bool(made["problem"]) == broken
    # No other plugin of this kind is selected either.
    assert bool(decision(root, "directory", **environ)["problem"]) == broken
    done = plugins(root, "--json", **environ)
    assert done.returncode == broken
    assert (f"The checkpointer plugin {name} (dummy-" in done.stderr) == broken
    people = plugins(root, "why", name, **environ)
    assert people.returncode == broken
    assert f"checkpointer {name}: {state}, " in people.stdout
    if broken:  # and a run fails in the same way
        code = "from accelerate_core import Accelerator\nAccelerator(cpu=True).save_state('x')"
        env = clean_environment(**environ)
        env["PYTHONPATH"] = f"{root}:{env['PYTHONPATH']}"
        error = pool.run(["-c", code], env, 60).stderr.strip().splitlines()[-1]
        assert f"plugin {name} (dummy-" in error


def test_precision_that_the_backend_does_not_accept_is_reported_before_a_run(root: Path) -> None:
    environ = {"ACCELERATE_BACKEND": "picky", "ACCELERATE_MIXED_PRECISION": "bf16"}
    made = decision(root, "bf16", **environ)
    assert made["state"] == "refused"
    assert made["problem"].startswith("Backend 'picky' cannot run mixed_precision='bf16'")
    done = plugins(root, "--json", **environ)
    assert done.returncode == 1
    assert made["problem"] in done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert (rows["picky"]["state"], rows["bf16"]["reason"]) == ("active", made["problem"])
    env = clean_environment(**environ)
    env["PYTHONPATH"] = f"{root}:{env['PYTHONPATH']}"
    code = "from accelerate_core import Accelerator\nAccelerator(cpu=True)"
    assert made["problem"] in pool.run(["-c", code], env, 60).stderr


def test_disabled_plugin_is_not_reported_as_missing(root: Path) -> None:
    run = "from accelerate_core import Accelerator\nAccelerator(cpu=True, {})"
    for off, asked in (
        ("directory", "preemption_signals='SIGTERM'"),
        ("queued", "log_with='jsonl', project_dir='x'"),
    ):
        env = clean_environment(ACCELERATE_DISABLED_PLUGINS=off)
        error = pool.run(["-c", run.format(asked)], env, 60).stderr.strip().splitlines()[-1]
        assert f"ACCELERATE_DISABLED_PLUGINS disables '{off}'" in error
        assert "installed" not in error


def test_why_advises_uninstalling_one_of_two_plugins_with_the_same_name(root: Path) -> None:
    twins = json.loads(plugins(root, "why", "twin", "--json").stdout)
    others = {"dummy-twin1": "dummy-twin2", "dummy-twin2": "dummy-twin1"}
    for twin in twins:
        owner = dict(twin["steps"])["installed"].split()[0]
        assert twin["advice"] == f"pip uninstall {others.pop(owner)}"
    assert not others


def test_why_names_broken_missing_and_duplicate_plugins(root: Path) -> None:
    assert decision(root, "gone")["state"] == "broken"
    assert decision(root, "verb")["advice"] == "accelerate-core verb"
    assert "the device that torch finds" in decision(root, "mps")["advice"]
    assert "sets the trigger's variable" in decision(root, "pmix")["advice"]
    assert "dummy-twin2 2.5" in decision(root, "twin")["steps"]["name"]
    assert decision(root, "single", ACCELERATE_DISABLED_PLUGINS="single")["state"] == "disabled"
    for name, expected in {
        "rihgt": "Did you mean 'right'?",
        "megatron_lm": 'pip install "accelerate-core[megatron]"',
        "forgot": "accelerate-forgot 0.3 is installed, but declares no plugin",
    }.items():
        done = plugins(root, "why", name)
        assert done.returncode == 2
        assert expected in done.stderr


@pytest.mark.parametrize("name", ["noep", "ddq"])
def test_missing_entry_point_is_reported_before_a_similar_name(root: Path, name: str) -> None:
    hint = f"accelerate-{name} 0.3 is installed, but declares no plugin. It needs an entry point"
    for done, group in (
        (plugins(root, "why", name), "backends"),
        (plugins(root, "check", name), "backends"),
        (plugins(root, "check", name, "--kind", "tracker"), "trackers"),
    ):
        assert done.returncode == 2
        assert hint in done.stderr
        line = f'[project.entry-points."accelerate_core.{group}"] {name} = "package.module:Class"'
        assert line in done.stderr
        assert "Did you mean" not in done.stderr


def test_library_with_the_requested_name_does_not_hide_a_suggestion(root: Path) -> None:
    errors = plugins(root, "why", "lefft").stderr
    assert "Did you mean 'left'?" in errors
    assert "declares no plugin" not in errors
    # Similar to no name, and a library that may belong to a plugin without being one.
    done = plugins(root, "--json", ACCELERATE_CHECKPOINTER="hypothesis")
    assert "No checkpointer plugin is named 'hypothesis'" in done.stderr
    assert "declares no plugin" not in done.stderr


def test_why_prints_readable_text(root: Path) -> None:
    done = plugins(root, "why", "left", USE_LEFT="1")
    assert "backend left: active, left wants it" in done.stdout
    assert "dummy-left 1.0, entry point dummy_left:Plugin" in done.stdout


def test_hooks_command_prints_the_contract(root: Path) -> None:
    whole = json.loads(plugins(root, "hooks", "--json").stdout)
    assert whole["hooks"]["backward"]["arguments"] == ["accelerator", "loss", "kwargs"]
    one = plugins(root, "hooks", "barrier")
    assert "barrier(accelerator, scope)" in one.stdout
    wrong = plugins(root, "hooks", "barier")
    assert wrong.returncode == 2
    assert "Did you mean 'barrier'?" in wrong.stderr


def test_plugins_with_the_same_name_are_listed_with_their_versions(root: Path) -> None:
    code = """
    from accelerate_core import Accelerator
    try:
        Accelerator(backend="twin")
    except Exception as error:
        out([type(error).__name__, str(error)])
    """
    kind, text = dummies.run(root, code)
    assert kind == "PluginError"
    assert "'twin': dummy-twin1 1.5 and dummy-twin2 2.5" in text


def test_kind_without_checks_is_refused_with_a_list_of_the_others(root: Path) -> None:
    done = plugins(root, "check", "left", "--kind", "bakend")
    assert done.returncode == 2
    assert "--kind 'bakend' is not one of 'backend', 'precision', 'tracker'" in done.stderr
    assert "Did you mean 'backend'?" in done.stderr


@pytest.mark.parametrize("below", ["file", "file/deeper", "x" * 300])
def test_unwritable_target_directory_is_one_clear_error(
    root: Path, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("kept")
    where = tmp_path / below / "new"
    done = plugins(root, "new", "ring2", "--kind", "backend", "--directory", str(where))
    assert done.returncode == 2
    assert f"The repository in {where} cannot be written: " in done.stderr
    assert "Choose another directory with --directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "kept"
