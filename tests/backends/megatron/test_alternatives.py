"""Without a CUDA device, megatron only recommends what accepts the whole request."""

from __future__ import annotations

import itertools

import pytest

from accelerate_core import ParallelismConfig
from accelerate_core.plugin import ConfigurationError, installed
from accelerate_megatron import MegatronLMPlugin, alternatives
from accelerate_megatron.alternatives import alternative
from accelerate_megatron.settings import Sizes


class _Installed:
    """The installed plugins without some backends."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing

    def of_kind(self, kind):
        return [one for one in installed().of_kind(kind) if one.name not in self.missing]


@pytest.mark.parametrize("fsdp2", ["installed", "missing", "disabled"])
def test_recommended_backend_accepts_all_sizes(fsdp2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fsdp2 == "missing":
        monkeypatch.setattr(alternatives, "installed", lambda: _Installed("fsdp2"))
    if fsdp2 == "disabled":
        monkeypatch.setenv("ACCELERATE_DISABLED_PLUGINS", "fsdp2")
    expected = {
        "installed": "use backend='fsdp2'",
        "missing": "install fsdp2: pip install",
        "disabled": "use backend='fsdp2'",
    }[fsdp2]
    for pp, tp, replicate, shard, ep in itertools.product((1, 2), repeat=5):
        config = ParallelismConfig(
            pp_size=pp, tp_size=tp, dp_replicate_size=replicate, dp_shard_size=shard
        )
        said = alternative(config, Sizes(tp=tp, pp=pp, ep=ep), "cpu")
        if pp > 1 or ep > 1:
            assert "fsdp2" not in said
            assert ("pp_size=2" in said) is (pp > 1)
            assert ("expert_model_parallel_size=2" in said) is (ep > 1)
            assert said.startswith("leave out")
        else:
            assert said.startswith(expected), said
            assert ("disables" in said) is (fsdp2 == "disabled")
            assert ("tp_size=2" in said) is (tp > 1 and fsdp2 != "missing")


def test_third_party_backend_with_pipelines_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Record:
        name = "pipes"

        def load_checked(self):
            return type("Pipes", (), {"supports": {"mesh": ("pp", "dp_shard"), "devices": None}})

    class Found:
        def of_kind(self, kind):
            return [*installed().of_kind(kind), Record()]

    monkeypatch.setattr(alternatives, "installed", Found)
    said = alternative(ParallelismConfig(pp_size=2), Sizes(pp=2), "cpu")
    assert said == "use backend='pipes' with ParallelismConfig(pp_size=2)"
    assert "leave out" in alternative(ParallelismConfig(pp_size=2, tp_size=2), Sizes(2, 2), "cpu")


@pytest.mark.parametrize(
    ("options", "expected", "absent"),
    [
        ({}, "cp_size=2)", "nothing"),
        ({"tp_degree": 2}, "cp_size=2, tp_size=2)", "deepspeed"),
        ({"pp_degree": 2}, "No other backend", "fsdp2"),
        ({"expert_model_parallel_size": 2}, "No other backend", "fsdp2"),
    ],
)
def test_context_parallel_names_what_accepts_the_other_sizes(
    options: dict[str, int], expected: str, absent: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MegatronLMPlugin(context_parallel_size=2, **options)
    assert expected in str(caught.value)
    assert absent not in str(caught.value)
