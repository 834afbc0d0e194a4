"""Config files and node lists that would need much time or memory are refused at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate_core.config.files import parse_config
from accelerate_core.plugin import ConfigurationError, read_config
from accelerate_launch.slurm import expand_counts, expand_nodes

LISTS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    "text", [LISTS, MERGES, 'a: "\\ud800"', "a: " + "[" * 5000, "#" * (2 << 20)]
)
def test_config_file_that_expands_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    begin = time.process_time()
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        read_config(path)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "text", ["n[1-10000000]", "n[1-60000],m[1-60000]", "n[1-" + "9" * 18 + "]"]
)
def test_long_node_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="more than 100000 nodes"):
        expand_nodes(text)


def test_long_list_of_counts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than 100000 nodes"):
        expand_counts("1(x100000001)")


@given(st.text(alphabet="n[]0123456789-,x()\u00b2", max_size=20))
def test_any_node_list_is_expanded_or_refused(text: str) -> None:
    for expand in (expand_nodes, expand_counts):
        try:
            expand(text)
        except ConfigurationError:
            pass


@given(st.text(alphabet="ab:&*<[]{}, \n-'\"\\u0d8!1.", max_size=30))
def test_any_config_file_is_parsed_or_refused(text: str) -> None:
    try:
        parse_config(text, Path("config.yaml"))
    except ConfigurationError:
        pass
