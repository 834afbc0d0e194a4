"""Loaders from a plugin's loader factory are checked, and their errors name the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
from dummies import distribution, run

CODE = """
import os


class Made:
    even_batches = put_on_device = True
    iteration = remainder = 0
    def __init__(self, accelerator, loader):
        self.state, self.loader = accelerator.gradient_state, loader
    def __len__(self):
        return len(self.loader)
    def __iter__(self):
        if os.environ["FAULT"] == "opening":
            raise ArithmeticError("boom")
        if os.environ["FAULT"].startswith("around"):
            return self.around()
        return self.state.serve(self, self.start, 2)
    def around(self):
        if os.environ["FAULT"] == "around before":
            raise ArithmeticError("boom")
        for batch in self.state.serve(self, self.start, 2):
            yield batch
            raise ArithmeticError("boom")
    def start(self, info):
        for number, batch in enumerate(self.loader):
            if number == 1 and os.environ["FAULT"] == "reading":
                raise ArithmeticError("boom")
            info.last = number == len(self.loader) - 1
            yield batch
    def set_epoch(self, epoch):
        raise ArithmeticError("boom")
    def state_dict(self):
        if os.environ["FAULT"] == "unsavable":
            return {"open": (number for number in ())}
        raise ArithmeticError("boom")
    def load_state_dict(self, state_dict):
        raise ArithmeticError("boom")
    def skipping(self, num_batches):
        if os.environ["FAULT"] == "skipping":
            raise ArithmeticError("boom")
        return self

class Plain(Made):
    def __reduce__(self):
        return Plain, (None, [])
    def __init__(self, accelerator, loader):
        self.loader = loader

class Alone(Made):
    def __iter__(self):
        return iter(self.loader)

class Maker:
    name = "made"
    api_version = (1, 0)
    def make_loader(self, accelerator, loader):
        kinds = {"returned": lambda *_: [1, 2], "alone": Alone, "plain": Plain}
        return kinds.get(os.environ["FAULT"], Made)(accelerator, loader)
"""
SCRIPT = """
import copy, pickle, traceback
import torch
from torch.utils.data import DataLoader
from accelerate_core import Accelerator, skip_first_batches
accelerator = Accelerator(cpu=True, loaders="made")
try:
    loader = accelerator.prepare(DataLoader(torch.arange(8.0), 2))
    kinds = f"{type(loader).__name__} {type(loader.base).__name__} {len(loader)}"
    out(f"{kinds} { {use} }")
except Exception:
    out(traceback.format_exc())
"""
EPOCH = "[accelerator.gradient_state.end_of_dataloader for _ in loader]"


def output_of(root: Path, fault: str, use: str = EPOCH) -> str:
    distribution(root, "made", CODE, {"loaders": {"made": "Maker"}})
    output: str = run(root, SCRIPT.replace("{use}", use), {"FAULT": fault})
    return output


def test_external_loader_wraps_the_plugins_loader(tmp_path) -> None:
    assert output_of(tmp_path, "") == "ExternalLoader Made 4 [False, False, False, True]"


@pytest.mark.parametrize(
    ("fault", "use", "hook"),
    [
        ("opening", EPOCH, "__iter__"),
        ("reading", EPOCH, "__iter__"),
        ("around before", EPOCH, "__iter__"),
        ("around", EPOCH, "__iter__"),
        ("", "loader.set_epoch(1)", "set_epoch"),
        ("", "loader.state_dict()", "state_dict"),
        ("", "loader.load_state_dict({})", "load_state_dict"),
        ("skipping", "skip_first_batches(loader, 1)", "skipping"),
        ("reading", "list(skip_first_batches(loader, 1))", "__iter__"),
    ],
)
def test_error_in_an_external_loader_names_its_plugin(
    tmp_path, fault: str, use: str, hook: str
) -> None:
    output = output_of(tmp_path, fault, use)
    note = f"accelerate-core: hook '{hook}' of plugin made (dummy-made 1.0)"
    assert output.count(note) == 1, output
    assert "ArithmeticError: boom" in output


def test_error_in_the_users_loop_does_not_name_the_plugin(tmp_path) -> None:
    output = output_of(tmp_path, "", "[1 / 0 for _ in loader]")
    assert "ZeroDivisionError" in output
    assert "of plugin made" not in output


def test_error_in_a_loop_listener_does_not_name_the_plugin(tmp_path) -> None:
    use = "setattr(accelerator.gradient_state, 'loop_body_end', lambda: 1 / 0) or list(loader)"
    output = output_of(tmp_path, "", use)
    assert "ZeroDivisionError" in output
    assert "of plugin made" not in output


HELD = "[accelerator.gradient_state.active_dataloader is held for held in [{}] for _ in held]"


@pytest.mark.parametrize("held", ["loader", "skip_first_batches(loader, 1)"])
def test_active_loader_is_the_object_that_the_script_holds(tmp_path, held: str) -> None:
    assert output_of(tmp_path, "", HELD.format(held)).endswith("[True, True, True, True]")


@pytest.mark.parametrize("blocking", [True, False])
def test_error_for_a_state_that_cannot_be_saved_names_the_loader(tmp_path, blocking: bool) -> None:
    save = f"accelerator.save_state({str(tmp_path / 'saved')!r}, blocking={blocking})"
    output = output_of(tmp_path, "unsavable", f"({save}, accelerator.wait_for_checkpoint())")
    assert "CheckpointError" in output
    assert "state_dict of loader 0 (dummy_made.Made): TypeError: cannot pickle" in output


def test_result_that_is_not_a_prepared_loader_is_refused(tmp_path) -> None:
    output = output_of(tmp_path, "returned")
    assert "PluginError: A list, which make_loader of made (dummy-made 1.0) returned," in output
    assert "has no 'iteration', 'remainder', 'set_epoch'" in output


def test_loader_that_does_not_report_its_batches_is_refused(tmp_path) -> None:
    output = output_of(tmp_path, "alone")
    assert "The loader of made (dummy-made 1.0) yields batches without reporting them" in output
    assert "gradient_state.serve(self, start, whole)" in output


def test_copies_and_pickles_contain_the_plugins_loader(tmp_path) -> None:
    use = (
        "[type(copy.copy(loader)).__name__, type(pickle.loads(pickle.dumps([loader]))[0]).__name__]"
    )
    output = output_of(tmp_path, "plain", use)
    assert output.endswith("['Plain', 'Plain']"), output


HALF = """
class Half:
    name = "half"
    api_version = (1, 0)
    def __init__(self, *arguments): ...
    def attach(self, run): ...
"""


@pytest.mark.parametrize(
    ("kind", "lacks"), [("checkpointer", "'save_state'"), ("loaders", "'make_loader'")]
)
def test_plugin_that_lacks_a_method_is_refused_at_construction(
    tmp_path: Path, kind: str, lacks: str
) -> None:
    group = "checkpointers" if kind == "checkpointer" else kind
    distribution(tmp_path, "half", HALF, {group: {"half": "Half"}})
    code = f"""
    from accelerate_core import Accelerator
    try:
        Accelerator(cpu=True, {kind}="half")
    except Exception as error:
        out([type(error).__name__, str(error)])
    """
    found, text = run(tmp_path, code)
    assert found == "PluginError"
    assert f"The {kind} plugin half (dummy-half 1.0) has no" in text
    assert lacks in text


SETS_IN_INIT = """
class Late:
    name = "late"
    api_version = (1, 0)
    def __init__(self, *arguments):
        self.preemption_requested = False
    def nothing(self, *arguments, **named): ...
    attach = save_state = load_state = save = save_model = wait = release = close = nothing
"""


def test_plugin_attributes_can_be_set_in_its_constructor(tmp_path: Path) -> None:
    distribution(tmp_path, "late", SETS_IN_INIT, {"checkpointers": {"late": "Late"}})
    code = """
    from accelerate_core import Accelerator
    out(Accelerator(cpu=True, checkpointer="late").preemption_requested)
    """
    assert run(tmp_path, code) is False
