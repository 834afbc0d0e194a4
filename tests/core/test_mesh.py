"""`ParallelismConfig`: its arithmetic, its sources, and the backends that accept it."""

from __future__ import annotations

import pytest

from accelerate_core import Accelerator, Backend, ParallelismConfig
from accelerate_core.errors import ConfigurationError
from accelerate_core.utils import TorchTensorParallelPlugin


class Meshed(Backend):
    name = "meshed"
    api_version = (1, 0)
    reduces_gradients = "never"
    supports = {"mesh": ("dp_shard", "tp")}


def test_coordinates_and_shards_of_each_rank():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    assert config.total_size == 8
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert config.arithmetic() == "dp_replicate 2 x dp_shard 2 x tp 2 = 8"
    assert (config.data_parallel_size, config.non_data_parallel_size) == (4, 2)
    assert config.coordinates(6) == {
        "pp": 0, "dp_replicate": 1, "dp_shard": 1, "cp": 0, "sp": 0, "tp": 0,
    }  # fmt: skip
    data = [config.shard(rank, ("dp_replicate", "dp_shard")) for rank in range(8)]
    assert data == [(0, 4), (0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4), (3, 4)]
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp"]


def test_error_shows_the_arithmetic_of_the_mesh():
    with pytest.raises(
        ConfigurationError, match=r"dp_shard 2 x tp 2 = 4 .*8 were.*dp_shard_size=4"
    ):
        ParallelismConfig(dp_shard_size=2, tp_size=2).check(8)
    with pytest.raises(ConfigurationError, match=r"needs tp 3 = 3 .* but 1 was started. Start 3"):
        ParallelismConfig(tp_size=3).check(1)
    with pytest.raises(ConfigurationError, match="both split the sequence"):
        ParallelismConfig(cp_size=2, sp_size=2)
    with pytest.raises(ConfigurationError, match="greater than or equal to 1"):
        ParallelismConfig(tp_size=0)


def test_errors_name_the_source_of_the_sizes(monkeypatch, tmp_path):
    def sizes(**arguments):
        with pytest.raises(ConfigurationError) as failure:
            Accelerator(cpu=True, backend=Meshed, **arguments)
        return str(failure.value)

    assert "from constructor argument parallelism_config" in sizes(
        parallelism_config=ParallelismConfig(tp_size=2)
    )
    with pytest.warns(FutureWarning, match="torch_tp_plugin"):
        assert "needs tp 4 = 4" in sizes(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=4))
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "3")
    with Accelerator(cpu=True, backend=Meshed) as accelerator:
        assert accelerator.parallelism_config.tp_size == 1, (
            "the sizes should be ignored without ACCELERATE_USE_PARALLELISM_CONFIG"
        )
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert "environment variable PARALLELISM_CONFIG_TP_SIZE" in sizes()
    monkeypatch.delenv("PARALLELISM_CONFIG_TP_SIZE")
    monkeypatch.delenv("ACCELERATE_USE_PARALLELISM_CONFIG")
    path = tmp_path / "config.yaml"
    path.write_text("parallelism_config:\n  parallelism_config_dp_shard_size: 5\n")
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
    text = sizes()
    assert "dp_shard 5 = 5" in text
    assert "config.yaml line 2" in text


def test_only_dimensions_that_the_backend_declares_are_accepted():
    with pytest.raises(
        ConfigurationError,
        match=r"'meshed' does not support the mesh dimension 'cp' .from constructor",
    ):
        Accelerator(cpu=True, backend=Meshed, parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(
        ConfigurationError,
        match=r"'single' does not support the mesh dimension 'tp'.*it supports none",
    ):
        Accelerator(cpu=True, backend="single", parallelism_config=ParallelismConfig(tp_size=2))
    with Accelerator(cpu=True) as accelerator:
        assert accelerator.parallelism_config is None
        assert accelerator.torch_device_mesh is None
        assert accelerator.tensor_parallel_rank == 0
