"""`accelerate-core config`: its questions, with and without a terminal, and its subcommands."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pool
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import run_cli
from support import clean_environment
from warm_python import warm_python

from accelerate_core.errors import AccelerateError
from accelerate_launch.editing import with_value

HOME = "ACCELERATE_CONFIG_HOME"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return variables for a separate config directory and a separate cache of Accelerate."""
    return {HOME: str(tmp_path / "ours"), "HF_HOME": str(tmp_path / "theirs")}


def config(env: dict[str, str], *arguments: str, text: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [warm_python(), "-m", "accelerate_core.cli", "config", *arguments],
        env=clean_environment(**env),
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def validate(env: dict[str, str], file: Path) -> tuple[int, str]:
    """Run `config validate`, which imports the plugins that a file uses, in a warm interpreter."""
    command = ["-m", "accelerate_core.cli", "config", "validate", file]
    done = pool.run(command, clean_environment(**env), 60)
    return done.returncode, done.stdout + done.stderr


def written(env: dict[str, str]) -> dict[str, object]:
    made = yaml.safe_load((Path(env[HOME]) / "config.yaml").read_text())
    assert isinstance(made, dict)
    return made


def test_yes_and_default_ask_no_questions(env: dict[str, str]) -> None:
    status, output = config(env, "--yes")
    assert status == 0, output
    assert written(env)["num_machines"] == 1
    said = written(env).get("use_cpu")  # not written on a machine without accelerators
    assert said is (False if torch.accelerator.is_available() else None)
    status, output = config(env, "default", "--mixed-precision", "bf16")
    assert status == 0, output
    assert written(env)["mixed_precision"] == "bf16"
    status, output = config(env, "default", "--mixed_precision", "bf61")
    assert status == 2
    assert "Did you mean 'bf16'?" in output


ANSWERS = {
    "machines": "1",
    "processes": "2",
    "backend": "fsdp2",
    "precision": "bf16",
    "accumulation": "4",
    "compiler": "",
}


def test_answers_are_read_from_standard_input_without_a_terminal(
    env: dict[str, str], tmp_path: Path
) -> None:
    env["PATH"] = str(tmp_path)  # without mpirun, which would add a question
    plugin = ["yes", "size_based_wrap", "", "", "no", "", "5000", "yes", "1", "2", "1", "1", "1"]
    text = "\n".join([*ANSWERS.values(), *plugin, *[""] * 9])
    status, output = config(env, text=text)
    assert status == 0, output
    made = written(env)
    assert (made["backend"], made["mixed_precision"]) == ("fsdp2", "bf16")
    assert made["gradient_accumulation_steps"] == 4
    section = made["fsdp_config"]
    assert isinstance(section, dict)
    assert section["fsdp_auto_wrap_policy"] == "size_based_wrap"
    assert section["fsdp_min_num_params"] == 5000
    assert "Classes whose modules" not in output  # only asked for the other policy
    done = run_cli("config", "show", "--json", env=env, forked=True)
    assert json.loads(done.stdout)["backend"]["from"].endswith("config.yaml line 4")


def test_backend_without_questions_asks_none(env: dict[str, str], tmp_path: Path) -> None:
    env["PATH"] = str(tmp_path)
    status, output = config(env, text="1\n1\n\n\n\n\n")
    assert status == 0, output
    assert "fsdp" not in json.dumps(written(env))


@pytest.mark.parametrize(
    ("answers", "section"),
    [
        (["", "no", "rowwise"], {"fp8_backend": "AO", "fp8_recipe": "rowwise", "fp8_pad_inner_dim": False}),
        (["TE", "yes", "current"], {
            "fp8_backend": "TE", "fp8_use_autocast_during_eval": True, "fp8_te_recipe": "current"
        }),
        (["2", "O1"], {"fp8_backend": "MSAMP", "fp8_opt_level": "O1"}),
    ],
)  # fmt: skip
def test_fp8_questions_follow_the_chosen_library(
    env: dict[str, str], tmp_path: Path, answers: list[str], section: dict[str, object]
) -> None:
    env["PATH"] = str(tmp_path)
    # One process, the default backend, fp8, and the defaults for accumulation and compiler.
    status, output = config(env, text="\n".join(["1", "1", "", "fp8", "", "", *answers, *[""] * 9]))
    assert status == 0, output
    assert written(env)["fp8_config"] == section
    assert validate(env, Path(env[HOME]) / "config.yaml")[0] == 0


PODS = {
    "gcloud": (
        ["", "pod", "us-central2-b", "A=1, B=2", "no", "", "pip install a, ls"],
        {"tpu_name": "pod", "tpu_zone": "us-central2-b", "tpu_env": ["A=1", "B=2"],
         "tpu_use_sudo": False, "commands": ["pip install a", "ls"]},
    ),
    "ssh": (
        ["one, two", "", "yes", "setup.sh"],
        {"tpu_vm": ["one", "two"], "tpu_use_sudo": True, "command_file": "setup.sh"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("hosts", PODS)
def test_tpu_pod_questions_ask_for_its_hosts(
    env: dict[str, str], tmp_path: Path, hosts: str
) -> None:
    env["PATH"] = str(tmp_path)
    answers, expected = PODS[hosts]
    # Eight XLA processes on TPUs in bf16, with downcast and no mesh, function `main`, on a pod.
    start = ["1", "8", "xla", "bf16", "", "", "yes", "no", "yes", "", "no", "main", "yes"]
    status, output = config(env, text="\n".join([*start, *answers, ""]))
    assert status == 0, output
    made = written(env)
    assert made["distributed_type"] == "XLA"
    assert "backend" not in made, "distributed_type already implies it"
    section = {"spmd": False, "downcast_bf16": True, "state_dict_type": "FULL_STATE_DICT"}
    assert made["xla_config"] == section
    of_launch = {"main_training_function": "main", "tpu_use_cluster": True, **expected}
    assert {key: made[key] for key in of_launch} == of_launch
    assert validate(env, Path(env[HOME]) / "config.yaml")[0] == 0
    (tmp_path / "s.py").write_text("")
    dry = run_cli("launch", "--dry_run", tmp_path / "s.py", env=env, forked=True).stdout
    assert dry.startswith("gcloud " if hosts == "gcloud" else f"{sys.executable} -m accelerate_xla")


def test_xla_without_tpus_asks_no_questions_about_pods(env: dict[str, str], tmp_path: Path) -> None:
    env["PATH"] = str(tmp_path)
    text = "\n".join(["1", "1", "xla", "no", "", "", "no", "yes", "", "no", ""])
    status, output = config(env, text=text)
    assert status == 0, output
    assert "pod" not in output
    made = written(env)
    assert made["backend"] == "xla"
    assert made["xla_config"] == {"spmd": True, "state_dict_type": "FULL_STATE_DICT"}


def test_input_that_ends_early_is_an_error_with_advice(env: dict[str, str]) -> None:
    status, output = config(env, text="1\n")
    assert status == 2
    assert "accelerate-core config --yes" in output
    assert not (Path(env[HOME]) / "config.yaml").exists()


def test_invalid_answer_is_asked_again(env: dict[str, str], tmp_path: Path) -> None:
    env["PATH"] = str(tmp_path)
    status, output = config(env, text="1\nmany\n1\n\nbf61\nbf16\n\n\n")
    assert status == 0, output
    assert "'many' is not a whole number" in output
    assert "Did you mean 'bf16'?" in output
    assert written(env)["mixed_precision"] == "bf16"


def test_import_of_the_accelerate_config_file_is_offered(env: dict[str, str]) -> None:
    theirs = Path(env["HF_HOME"]) / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 2\nmain_training_function: main\n"
    )
    status, output = config(env, text="yes\n")
    assert status == 0, output
    assert str(theirs) in output.replace("\n", "")
    assert written(env) == {"distributed_type": "MULTI_CPU", "num_processes": 2}


def test_accelerate_config_file_is_used_only_after_import(env: dict[str, str]) -> None:
    theirs = Path(env["HF_HOME"]) / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("num_processes: 2\nmixed_precision: bf16\nsame_network: true\n")
    status, output = config(env, "show")
    assert status == 0, output
    assert "accelerate-core config import" in " ".join(output.split())
    assert "bf16" not in output
    assert config(env, "import")[0] == 0
    assert written(env) == {"num_processes": 2, "mixed_precision": "bf16"}
    assert "bf16" in config(env, "show")[1]
    status, output = config(env, "import")
    assert (status, "--config_file" in output) == (2, True)
    other = theirs.with_name("other.json")
    other.write_text('{"num_processes": 3}')
    assert config(env, "import", str(other), "--config_file", f"{other}.yaml")[0] == 0
    assert yaml.safe_load(Path(f"{other}.yaml").read_text()) == {"num_processes": 3}


def test_import_errors_name_the_line_in_the_original_file(
    env: dict[str, str], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("mixed_precision: bf16\nfoo: 3\n")
    ours = tmp_path / "ours.yaml"
    status, output = config(env, "import", str(theirs), "--config_file", str(ours))
    assert status != 0
    assert f"Unknown key 'foo' in {theirs} line 2" in output
    assert not ours.exists()


def test_import_lists_what_it_read_and_left_out(env: dict[str, str], tmp_path: Path) -> None:
    status, output = config(env, "import")
    assert status == 2
    assert "There is no config file of Hugging Face Accelerate at" in output
    assert "accelerate-core config import FILE" in output
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("num_processes: 2\nmain_training_function: main\nmixed_precision: bf16\n")
    status, output = config(env, "import", str(theirs))
    assert status == 0, output
    assert f"Read {theirs}: num_processes, mixed_precision." in output
    assert "Left out main_training_function: the script runs as a program" in output
    assert f"Written: {Path(env[HOME]) / 'config.yaml'}" in output


def read(terminal: int) -> bytes:
    ready, _, _ = select.select([terminal], [], [], 5)
    return os.read(terminal, 4096) if ready else b""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="pseudo-terminals")
def test_questions_on_a_terminal_are_answered_with_arrow_keys(
    env: dict[str, str], tmp_path: Path
) -> None:
    import pty

    child, terminal = pty.fork()
    if child == 0:
        os.environ.clear()
        os.environ.update(clean_environment(**env, TERM="xterm", COLUMNS="100"))
        os.environ["PATH"] = str(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "accelerate_core.cli", "config"])
    seen = b""
    answers = [(b"machines?", b"\r"), (b"together?", b"2\r"), (b"backend?", b"\r")]
    answers += [
        (b"precision?", b"\x1b[A\x1b[B\x1b[A\x1b[A\r"),
        (b"step?", b"\r"),
        (b"compile?", b"\r"),
    ]
    deadline = time.monotonic() + 30
    try:
        for question, keys in answers:
            while question not in seen and time.monotonic() < deadline:
                seen += read(terminal)
            time.sleep(0.3)  # until the menu is drawn and reads keys
            os.write(terminal, keys)
            seen = b""
        while time.monotonic() < deadline:
            seen += read(terminal)
    except OSError:
        pass  # the program has ended
    finally:
        os.kill(child, signal.SIGCONT if time.monotonic() < deadline else signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, seen.decode()
    # The names are sorted and the suggestion for a CPU is the last one. The keys move up to fp16.
    assert written(env)["mixed_precision"] == "fp16"
    assert written(env)["num_processes"] == 2


def test_config_set_changes_only_one_value(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# mine\nnum_processes: 2  # two\nfsdp_config:\n  fsdp_version: 2\n\n# end\n")
    for key, value in (("num_processes", "4"), ("fsdp_config.fsdp_offload_params", "true")):
        status, output = config(env, "set", key, value, "--config_file", str(file))
        assert status == 0, output
    status, output = config(env, "set", "mixed_precision", "bf16", "--config_file", str(file))
    text = file.read_text()
    assert "# mine\nnum_processes: 4  # two\n" in text
    assert "# end" in text
    assert yaml.safe_load(text) == {
        "num_processes": 4,
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
        "mixed_precision": "bf16",
    }


def test_config_set_keeps_the_spelling_of_other_values() -> None:
    text = (
        "# head\na: True   # a\nb: ~\nc:\nd: 1e-4\ne: 'q'\nf: \"z\"\nn: no\no: 010\n"
        "s:\n    p: yes  # p\n    l:\n    - 1\n\n    q: |\n        two\n        lines\n"
    )
    assert with_value(text, "k", "no") == f"{text}k: no\n"
    assert with_value(text, "d", "2") == text.replace("1e-4", "2")
    listed = "---\nl:\n  - 1\n  - {a: 1}\n" + f"w: {'word ' * 60}end\n"
    assert with_value(listed, "k", "'no'") == f"{listed}k: 'no'\n"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_proceses", "2", "Did you mean 'num_processes'?"),
        ("num_processes", "two", "must be a whole number"),
        ("fsdp_config.fsdp_offload_param", "true", "Did you mean 'fsdp_offload_params'?"),
        ("mixed_precision", "[", "not valid YAML"),
        ("num_processes.x", "1", "is not a section"),
    ],
)
def test_config_set_refuses_invalid_values(
    env: dict[str, str], tmp_path: Path, key: str, value: str, message: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("num_processes: 1\n")
    status, output = config(env, "set", key, value, "--config_file", str(file))
    assert status == 2
    assert message in output
    assert file.read_text() == "num_processes: 1\n"


def test_validate_uses_the_plugins_own_checks(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n")
    status, output = validate(env, file)
    assert status == 2
    assert "fsdp_version=1 is not supported" in output
    assert f"{file} line 3" in output.replace("\n", "")
    file.write_text("fp8_config:\n  fp8_format: E5M2\n")
    status, output = validate(env, file)
    assert status == 2
    assert "does not support training in E5M2 alone" in " ".join(output.split())
    status, output = validate({**env, "ACCELERATE_DISABLED_PLUGINS": "fp8"}, file)
    assert status == 2
    assert "does not support" not in output


NAMES = st.sampled_from(["a", "b", "s.a", "s.b", "t.c"])
WORDS = st.sampled_from(["1", "true", "x", "[1, 2]", "{p: 1}", "'q # r'", "null"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, WORDS), min_size=1, max_size=8))
def test_editing_the_text_changes_exactly_the_edited_values(edits: list[tuple[str, str]]) -> None:
    text, values = "# head\n", {}
    for key, value in edits:
        section, _, name = key.rpartition(".")
        text = with_value(text, key, value)
        inside = values.setdefault(section, {}) if section else values
        inside[name] = yaml.safe_load(value)
        assert yaml.safe_load(text) == values, text
    assert text.startswith("# head\n")


def test_impossible_edits_are_refused() -> None:
    for text, key, value in (("- 1\n", "a", "1"), ("a: 1\n", "a.b", "1"), ("", "a", "1\nb: 2")):
        with pytest.raises(AccelerateError):
            with_value(text, key, value)
