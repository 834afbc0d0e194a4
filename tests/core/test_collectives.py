"""Nested structures on one process, and every collective on two and three."""

from __future__ import annotations

import json
import os
import signal
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import collectives_worker as worker
import pool
import pytest
import torch

from accelerate_big_model.tensors import find_device
from accelerate_core.distributed import collectives
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.torch_collectives import Scope
from accelerate_core.distributed.tree import (
    TensorInformation,
    convert_to_fp32,
    flatten,
    get_data_structure,
    honor_type,
    is_namedtuple,
    map_leaves,
    map_tensors,
    send_to_device,
)
from accelerate_drop_in import trees
from accelerate_drop_in.verbs import broadcast_object_list, copy_tensor_to_devices

Point = namedtuple("Point", "x y")


class Output(OrderedDict[str, Any]):
    """A dict subclass that mirrors its keys as attributes."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Encoding(UserDict[str, Any]):
    """A mapping whose `to` method only accepts a device."""

    moved_to: torch.device | None = None

    def to(self, device: torch.device) -> Encoding:
        self.moved_to = device
        return self


class Frozen(tuple[Any, ...]):
    """A tuple subclass."""


TREES: dict[str, Any] = {
    "list": [torch.ones(2), [torch.zeros(2)]],
    "tuple": (torch.ones(2),),
    "tuple subclass": Frozen([torch.ones(2)]),
    "namedtuple": Point(torch.ones(2), [torch.zeros(2)]),
    "dict": {"a": torch.ones(2)},
    "OrderedDict": OrderedDict(a=torch.ones(2)),
    "defaultdict": defaultdict[str, Any](list, a=torch.ones(2)),
    "UserDict": UserDict(a=torch.ones(2)),
    "dict with attributes": Output(a=torch.ones(2)),
    "structseq": torch.max(torch.ones(2, 2), 0),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_mapping_over_a_tree_keeps_types_and_leaves_the_input_unchanged(tree: Any) -> None:
    before = [leaf.clone() for leaf in flatten(tree)]
    result = map_tensors(lambda leaf: leaf + 1, tree)
    assert type(result) is type(tree)
    after = flatten(result)
    assert all(torch.equal(new, old + 1) for new, old in zip(after, before, strict=True))
    unchanged = flatten(tree)
    assert all(torch.equal(new, old) for new, old in zip(unchanged, before, strict=True))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_mapped_leaves_are_in_the_order_of_flatten(tree: Any) -> None:
    leaves = iter(flatten(tree))
    again = map_leaves(lambda leaf: next(leaves), tree)
    assert type(again) is type(tree)
    assert [id(leaf) for leaf in flatten(again)] == [id(leaf) for leaf in flatten(tree)]


def test_dict_subclass_keeps_its_attributes() -> None:
    result = map_tensors(lambda leaf: leaf * 2, Output(a=torch.ones(1)))
    assert result.a is result["a"]
    table = map_tensors(lambda leaf: leaf, defaultdict(int, a=torch.ones(1)))
    assert table["missing"] == 0


def test_recursively_apply_passes_arguments_and_can_refuse_other_types() -> None:
    assert trees.recursively_apply(torch.add, [torch.tensor(1), "x"], 2, alpha=3)[0] == 7
    assert trees.recursively_apply(len, ["ab", 1], test_type=lambda x: isinstance(x, str)) == [2, 1]
    with pytest.raises(TypeError, match=r"square does not accept a str.*is_torch_tensor"):
        trees.recursively_apply(torch.square, ["x"], error_on_other_type=True)


def test_tensors_tensor_information_and_namedtuples_are_recognised() -> None:
    info = TensorInformation(torch.Size([2]), torch.float32)
    assert trees.is_torch_tensor(torch.ones(1))
    assert not trees.is_torch_tensor([1])
    assert trees.is_tensor_information(info)
    assert not trees.is_tensor_information(torch.ones(1))
    assert is_namedtuple(Point(1, 2))
    assert not is_namedtuple((1, 2))
    assert honor_type(Point(1, 2), (v for v in (3, 4))) == Point(3, 4)
    assert honor_type((1,), [2]) == (2,)
    assert honor_type([1], (2,)) == [2]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_send_to_device_returns_the_same_object_if_nothing_moves(tree: Any) -> None:
    assert send_to_device(tree, "cpu") is tree
    assert send_to_device(tree, torch.device("cpu"), non_blocking=True) is tree


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_send_to_device_moves_every_tensor(tree: Any) -> None:
    result = send_to_device(tree, "meta")
    assert type(result) is type(tree)
    assert {leaf.device.type for leaf in flatten(result)} == {"meta"}
    assert {leaf.device.type for leaf in flatten(tree)} == {"cpu"}


def test_send_to_device_honours_skip_keys_and_custom_to_methods() -> None:
    batch = {"a": torch.ones(1), "deep": [{"keep": torch.ones(1)}], "text": "x", "none": None}
    result = send_to_device(batch, "meta", skip_keys="keep")
    assert result["a"].is_meta
    assert result["deep"][0]["keep"].device.type == "cpu"
    assert (result["text"], result["none"]) == ("x", None)
    assert not send_to_device(batch, "meta", skip_keys=["a"])["a"].is_meta

    encoding = Encoding(ids=torch.ones(1))
    assert send_to_device([encoding], "meta", non_blocking=True)[0] is encoding
    assert encoding.moved_to == torch.device("meta")
    assert send_to_device(torch.nn.Linear(1, 1), "meta").weight.is_meta
    part = send_to_device(Encoding(ids=torch.ones(1), n=torch.ones(1)), "meta", skip_keys="n")
    assert (part["ids"].is_meta, part["n"].is_meta) == (True, False)


def test_tensors_are_allocated_from_their_description() -> None:
    structure = get_data_structure({"x": torch.zeros(2, 3, dtype=torch.int8), "n": 3})
    assert structure == {"x": TensorInformation(torch.Size([2, 3]), torch.int8), "n": 3}
    empty = trees.initialize_tensors(structure)
    assert (empty["x"].shape, empty["x"].dtype, empty["n"]) == ((2, 3), torch.int8, 3)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(2)], 2),
        ({"names": ["a", "b"], "x": torch.ones(2, 5)}, 2),
        ({"loss": torch.tensor(1.0), "x": (torch.ones(4),)}, 4),
    ],
)
def test_batch_size_is_found_in_nested_batches(data: Any, size: int) -> None:
    assert trees.find_batch_size(data) == size
    assert trees.ignorant_find_batch_size(data) == size


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ([], ValueError, "empty list"),
        ({"a": ()}, ValueError, "empty dict"),
        (["x"], TypeError, "not a str"),
        (torch.tensor(1), ValueError, "0-d"),
    ],
)
def test_missing_batch_size_is_an_error(data: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        trees.find_batch_size(data)
    assert trees.ignorant_find_batch_size(data) is None


def test_device_is_found_in_nested_batches() -> None:
    assert find_device({"n": 1, "x": [torch.ones(1, device="meta")]}) == torch.device("meta")
    assert find_device(["x"]) is None


def test_listify_converts_tensors_to_lists_of_numbers() -> None:
    tree = {"a": torch.ones(2, dtype=torch.bfloat16), "b": (torch.tensor(3, requires_grad=False),)}
    assert trees.listify(tree) == {"a": [1.0, 1.0], "b": (3,)}
    assert trees.listify(torch.ones(1, requires_grad=True)) == [1.0]


def test_concatenate_reverses_slicing() -> None:
    tree = {"x": torch.arange(6).view(3, 2), "p": Point(torch.arange(3), [torch.arange(3.0)])}
    parts = [
        trees.slice_tensors(tree, slice(0, 2), 0, 2),
        trees.slice_tensors(tree, slice(2, 3), 1, 2),
    ]
    again = trees.concatenate(parts)
    assert trees.listify(again) == trees.listify(tree)
    assert type(again["p"]) is Point
    assert trees.slice_tensors({"s": torch.tensor(1), "n": "x"}, slice(0, 1)) == {"s": 1, "n": "x"}
    assert trees.concatenate([[torch.ones(2, 1)], [torch.ones(2, 2)]], dim=1)[0].shape == (2, 3)
    turned = [{"x": torch.ones(1), "y": torch.zeros(1)}, {"y": torch.zeros(1), "x": torch.ones(1)}]
    assert trees.listify(trees.concatenate(turned)) == {"x": [1, 1], "y": [0, 0]}
    assert trees.listify(trees.concatenate([torch.tensor(1), torch.tensor(2)])) == [1, 2]
    with pytest.raises(TypeError, match="not a str"):
        trees.concatenate([["a"], ["b"]])


def test_half_precision_is_converted_to_float32() -> None:
    tree = [torch.ones(1, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float64)]
    result = convert_to_fp32([*tree, torch.ones(1, dtype=torch.int8), "x"])
    assert [t.dtype for t in result[:4]] == [
        torch.float32,
        torch.float32,
        torch.float64,
        torch.int8,
    ]


@pytest.mark.parametrize(
    ("shape", "batch", "processes", "dim", "expected"),
    [
        ((3, 4, 4), 3, 4, 0, (4, 4, 4)),
        ((4, 2), 4, 4, 0, (4, 2)),
        ((5, 2), 5, 2, 0, (6, 2)),
        ((1,), 1, 3, 0, (3,)),
        ((2, 5), 5, 4, 1, (2, 8)),
        ((2, 5), 5, 4, -1, (2, 8)),
        ((7, 2), 5, 2, 0, (7, 2)),
        ((), 5, 2, 0, ()),
    ],
)
def test_inputs_are_padded_to_a_multiple_of_the_number_of_processes(
    shape: tuple[int, ...], batch: int, processes: int, dim: int, expected: tuple[int, ...]
) -> None:
    assert trees.pad_input_tensors(torch.rand(shape), batch, processes, dim).shape == expected


def test_inputs_are_padded_with_their_last_sample() -> None:
    assert trees.pad_input_tensors([torch.arange(3)], 3, 5)[0].tolist() == [0, 1, 2, 2, 2]


class Silent:
    """Hooks that must not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def alone(**more: Any) -> Communicator:
    device = torch.device("cpu")
    return Communicator(rank=0, size=1, device=device, hooks=Silent(), **more)


def test_collectives_are_the_identity_on_one_process() -> None:
    comm = alone(debug=True)
    tree = {"x": torch.tensor(1.0, requires_grad=True), "y": [torch.ones(2)]}
    assert collectives.gather(tree, comm) is tree
    assert collectives.gather_uneven(tree, comm) is tree
    assert collectives.broadcast(tree, comm=comm) is tree
    assert collectives.pad_across_processes(tree, comm=comm) is tree
    assert collectives.gather_object({"a": 1}, comm) == {"a": 1}
    assert broadcast_object_list(["a"], comm=comm) == ["a"]
    assert copy_tensor_to_devices(tree["y"][0], comm=comm) is tree["y"][0]


def test_communicator_is_the_identity_on_one_process() -> None:
    comm = alone()
    t = torch.ones(2)
    for result in (comm.gather(t), comm.reduce(t), comm.broadcast(t), comm.all_to_all(t)):
        assert result is t
    assert comm.scatter([t], t) is t
    assert comm.scatter(None, t) is t
    comm.barrier()
    assert comm.gather_object("a") == ["a"]
    assert comm.broadcast_object("a") == "a"
    assert comm.scatter_object(["a"]) == "a"
    assert comm.scatter_object(None) is None
    assert "size=1" in repr(comm)


def test_reduce_on_one_process_copies_and_returns_the_same_dtypes_as_on_several() -> None:
    total = torch.ones(2)
    result = collectives.reduce(total, comm=alone())
    total.zero_()
    assert result.tolist() == [1, 1]
    assert collectives.reduce(torch.tensor([3]), "mean", comm=alone()).dtype == torch.float32
    assert collectives.reduce(torch.tensor([3]), "sum", comm=alone()).dtype == torch.int64
    assert collectives.reduce(torch.tensor([3.0]), "mean", 2.0, comm=alone()).tolist() == [6]


def test_collective_hook_can_return_a_slice_of_a_larger_tensor() -> None:
    class Odd(Silent):
        def gather(self, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
            return torch.cat([tensor.new_zeros(1), tensor, tensor])[1:]

    comm = Communicator(rank=0, size=2, device=torch.device("cpu"), hooks=Odd())
    assert collectives.gather([torch.tensor([1.5])], comm)[0].tolist() == [1.5, 1.5]


def test_immutable_mappings_are_rebuilt() -> None:
    result = map_leaves(lambda leaf: leaf + 1, MappingProxyType({"a": 1}))
    assert result == {"a": 2}
    assert type(result) is MappingProxyType


# --- several processes ----------------------------------------------------------------------------


def run_group(size: int, folder: Path) -> list[dict[str, str]]:
    """Run the worker on `size` processes; return each rank's `{case: "" or traceback}`."""
    script = str(Path(worker.__file__))
    arguments = [str(size), str(folder / "store"), str(folder / "report")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"log.{rank}").open("w") for rank in range(size)]
    processes = [
        pool.start([script, str(rank), *arguments], environment, logs[rank], logs[rank], rank)
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.wait(120)
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.send(signal.SIGKILL)
            process.wait(5)
            log.close()
    reports = [folder / f"report.{rank}" for rank in range(size)]
    missing = [rank for rank, path in enumerate(reports) if not path.exists()]
    assert not missing, (folder / f"log.{missing[0]}").read_text()
    return [json.loads(path.read_text()) for path in reports]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 processes", "3 processes"])
def reports(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, str]]:
    return run_group(request.param, tmp_path_factory.mktemp("group"))


@pytest.mark.dist
@pytest.mark.parametrize("name", worker.CASES)
def test_case(reports: list[dict[str, str]], name: str) -> None:
    for rank, report in enumerate(reports):
        assert name in report, f"process {rank} stopped in an earlier case, {list(report)[-1]}"
        assert not report[name], f"process {rank}:\n{report[name]}"
