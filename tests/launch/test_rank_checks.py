"""`config validate` and `launch --dry_run` refuse what the ranks would refuse, with the same text."""

from __future__ import annotations

from pathlib import Path

import pool
import pytest
import yaml
from support import clean_environment

RANK = """
import os
from accelerate_core import Accelerator
from accelerate_core.errors import AccelerateError
try:
    accelerator = Accelerator()
except AccelerateError as error:
    print(f"refused: {error}")
else:
    print("accepted")
"""

TP = {"parallelism_config": {"parallelism_config_tp_size": 2}}
FSDP = {"fsdp_config": {"fsdp_version": 2}}
DEEPSPEED = {"deepspeed_config": {"zero_stage": 2}}

#: name -> (configuration, words of the error)
REFUSED = {
    "three processes for tp": ({"num_processes": 3, **TP}, "but 3 were started"),
    "a mesh for ddp": ({"num_processes": 2, "backend": "ddp", **TP}, "dimension 'tp'"),
    "pp for fsdp2": (
        {
            "num_processes": 2,
            "backend": "fsdp2",
            "parallelism_config": {"parallelism_config_pp_size": 2},
        },
        "dimension 'pp'",
    ),
    "ulysses of another backend": (
        {
            "num_processes": 2,
            "backend": "fsdp2",
            "parallelism_config": {
                "parallelism_config_sp_size": 2,
                "parallelism_config_sp_backend": "deepspeed",
            },
        },
        "sp_backend='deepspeed'",
    ),
    "several processes for a mesh of none": (
        {"num_processes": 4, "parallelism_config": {"parallelism_config_cp_size": 8}},
        "cp 8 = 8",
    ),
    "section of a precision": ({"fp8_config": {"backend": "TE"}}, "fp8_config"),
    "device of another backend": (
        {"num_processes": 2, "backend": "xla", "use_cpu": True},
        "",
    ),
    "contradicting accumulation": (
        {
            "num_processes": 2,
            "backend": "deepspeed",
            "gradient_accumulation_steps": 2,
            "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4},
        },
        "gradient_accumulation_steps",
    ),
}

#: name -> (configuration, sections that are ignored)
ACCEPTED = {
    "sections of two backends": (
        {"num_processes": 2, "backend": "ddp", **FSDP, **DEEPSPEED},
        ["fsdp_config", "deepspeed_config"],
    ),
    "section of the other backend": (
        {"num_processes": 2, "backend": "fsdp2", **FSDP, **DEEPSPEED},
        ["deepspeed_config"],
    ),
    "section of another launcher": (
        {"kubernetes_config": {"namespace": "a"}},
        ["kubernetes_config"],
    ),
    "sections of torchft": ({"num_processes": 4, "backend": "torchft_fsdp2", **FSDP}, []),
    "mesh without a number of processes": ({"backend": "fsdp2", **TP}, []),
    "mesh that fits": ({"num_processes": 2, **TP}, []),
    "one process": ({"num_processes": 1}, []),
}


def python(*command: str | Path, cwd: Path, **more: str) -> tuple[int, str]:
    environ = clean_environment(ACCELERATE_CONFIG_HOME=str(cwd / "home"), **more)
    done = pool.run(list(command), environ, 120, cwd=cwd, more=["torch"])
    return done.returncode, done.stdout + done.stderr


def written(folder: Path, values: dict[str, object]) -> Path:
    file = folder / "file.yaml"
    file.write_text(yaml.safe_dump({"use_cpu": True, **values}))
    return file


def commands(folder: Path, file: Path) -> list[tuple[int, str]]:
    script = folder / "script.py"
    script.write_text(RANK)
    command = ("-m", "accelerate_core.cli")
    return [
        python(*command, "config", "validate", file, cwd=folder),
        python(*command, "launch", "--config_file", file, "--dry_run", script, cwd=folder),
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ranks_refuse_is_refused_with_the_same_text(tmp_path: Path, name: str) -> None:
    values, words = REFUSED[name]
    file = written(tmp_path, values)
    (status, validated), (dry, shown) = commands(tmp_path, file)
    size = str(values.get("num_processes", 1))
    ranks = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    _, said = python(
        tmp_path / "script.py", cwd=tmp_path, ACCELERATE_CONFIG_FILE=str(file), **ranks
    )
    assert "refused: " in said
    text = said.partition("refused: ")[2].splitlines()[0]
    assert words in text
    text = text.partition(" contradicts ")[0]  # a launch compares these itself
    assert status == dry == 2, (validated, shown)
    assert text in " ".join(validated.split())
    assert text in " ".join(shown.split())
    assert "valid" not in validated.splitlines()


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_a_run_ignores_is_a_warning(tmp_path: Path, name: str) -> None:
    values, ignored = ACCEPTED[name]
    (status, validated), (dry, shown) = commands(tmp_path, written(tmp_path, values))
    assert status == 0, validated
    if name != "mesh without a number of processes":  # a launch starts one process here
        assert dry == 0, shown
    for output in (validated, shown):
        sections = [line.split()[1] for line in output.splitlines() if "is ignored: " in line]
        assert sorted(sections) == sorted(ignored)
