"""`accelerate-core to-fsdp2` converts config files from FSDP1 to FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from accelerate_launch.cli import cli

OLD = """
distributed_type: FSDP
num_machines: 2
num_processes: 8
main_process_ip: 10.0.0.1
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: {strategy}
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_use_orig_params: true
  fsdp_offload_params: true
  fsdp_state_dict_type: LOCAL_STATE_DICT
  transformer_layer_cls_to_wrap: Block
"""


def convert(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    (folder / "old.yaml").write_text(text)
    command = ["to-fsdp2", "--config_file", str(folder / "old.yaml"), *arguments]
    result = CliRunner().invoke(cli, command)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("strategy", "reshards", "mesh"),
    [
        ("FULL_SHARD", True, None),
        ("2", False, None),
        ("HYBRID_SHARD", True, (2, 4)),
        ("HYBRID_SHARD_ZERO2", False, (2, 4)),
    ],
)
def test_file_for_fsdp1_is_converted_to_fsdp2(
    tmp_path: Path, strategy: str, reshards: bool, mesh: tuple[int, int] | None
) -> None:
    new = tmp_path / "new.yaml"
    status, output = convert(tmp_path, OLD.format(strategy=strategy), "--output_file", str(new))
    assert status == 0, output
    made = yaml.safe_load(new.read_text())
    assert made["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshards,
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
    }
    sizes = made.get("parallelism_config", {}).values()
    assert tuple(sizes) == (mesh or ())
    assert "fsdp_use_orig_params" in output
    checked = CliRunner().invoke(cli, ["config", "validate", str(new)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: 2\n", "has no fsdp_config"),
        ("fsdp_config:\n  fsdp_version: 2\n", "is already for FSDP2"),
        (OLD.format(strategy="NO_SHARD"), "use the backend ddp"),
        (OLD.format(strategy="SHARD"), "is not a valid value"),
    ],
)
def test_unsupported_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    status, output = convert(tmp_path, text, "--overwrite")
    assert status == 2
    assert message in output


def test_existing_file_is_not_replaced_without_overwrite(tmp_path: Path) -> None:
    status, output = convert(tmp_path, OLD.format(strategy="FULL_SHARD"))
    assert status == 2
    assert "--overwrite" in output
