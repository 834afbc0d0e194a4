"""The Accelerator's public names: those of Accelerate, the plugin view, and a documented list."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from accelerate_core import Accelerator
from accelerate_core.accelerator.assignment import Assignable
from accelerate_core.accelerator.checkpoint_verbs import CheckpointVerbs
from accelerate_core.accelerator.collective_verbs import CollectiveVerbs
from accelerate_core.accelerator.preparing_verbs import PreparedVerbs
from accelerate_core.accelerator.signature import MeshVerbs
from accelerate_core.accelerator.started import SetupAndRanks
from accelerate_core.accelerator.tracking_verbs import TrackingVerbs
from accelerate_core.accelerator.training_verbs import TrainingVerbs
from accelerate_core.config.shown import Shown
from accelerate_core.contract.view import AcceleratorView
from accelerate_core.state import ProcessVerbs, Ranks

ROOT = Path(__file__).parents[2]
#: Public names of Hugging Face Accelerate 1.15's Accelerator on one process.
NAMES = """
accumulate ao_recipe_handler autocast autocast_handler backward check_trigger clear
clip_grad_norm_ clip_grad_value_ context_parallel_rank data_parallel_rank
data_parallel_shard_rank dataloader_config ddp_handler deepspeed_plugin
deepspeed_ulysses_dl_adapter delayed_fp8_autocast device device_placement dispatch_batches
distributed_type end_training even_batches flag_tensor fp8_backend fp8_enabled
fp8_recipe_handler free_memory gather gather_for_metrics get_state_dict get_tracker
gradient_accumulation_steps gradient_state has_fp8_handler has_lomo_optimizer init_handler
init_trackers is_composable_parallelism_enabled is_fsdp2 is_last_process is_local_main_process
is_main_process join_uneven_inputs load_state local_main_process_first local_process_index log
log_with logging_dir lomo_backward main_process_first maybe_context_parallel mixed_precision
msamp_recipe_handler multi_device native_amp no_sync non_blocking num_processes on_last_process
on_local_main_process on_local_process on_main_process on_process optimizer_step_was_skipped
pad_across_processes parallelism_config pipeline_parallel_rank prepare prepare_data_loader
prepare_model prepare_optimizer prepare_scheduler print process_index profile profile_handler
project_configuration project_dir reduce register_for_checkpointing register_load_state_pre_hook
register_save_state_pre_hook rng_types save save_iteration save_model save_state scaler
scaler_handler set_trigger should_save_model skip_first_batches split_batches
split_between_processes state step step_scheduler_with_optimizer sync_gradients
te_recipe_handler tensor_parallel_rank torch_device_mesh trackers trigger_sync_in_backward
unscale_gradients unwrap_model use_distributed use_seedable_sampler use_stateful_dataloader
verify_device_map wait_for_everyone
"""
OF_ACCELERATE = set(NAMES.split())
#: The subset that only exists with an active plugin.
WITH_A_PLUGIN = {"deepspeed_ulysses_dl_adapter"}


def test_public_names_match_accelerate_and_a_documented_list() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    table = page.partition("## Members that Accelerate does not have")[2]
    documented = {
        name
        for row in re.findall(r"^\| (`.+?) \|", table, re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    views = [cls for cls in AcceleratorView.__mro__ if cls.__module__ == AcceleratorView.__module__]
    view = {name for cls in views for name in vars(cls) if not name.startswith("_")}
    accelerator = Accelerator(cpu=True)
    names = {name for name in {*dir(Accelerator), *vars(accelerator)} if name[0] != "_"}
    assert names - OF_ACCELERATE - view == documented
    assert {
        name for name in OF_ACCELERATE - names if not hasattr(accelerator, name)
    } == WITH_A_PLUGIN


def test_public_members_are_documented_and_methods_typed() -> None:
    members = {n: m for n, m in inspect.getmembers_static(Accelerator) if not n.startswith("_")}
    assert [name for name, member in members.items() if not inspect.getdoc(member)] == []
    untyped = [
        name
        for name, member in members.items()
        if inspect.isfunction(member)
        and inspect.signature(member).return_annotation is inspect.Signature.empty
    ]
    assert untyped == []


def test_accelerator_inherits_its_methods_from_the_facades() -> None:
    verbs = (PreparedVerbs, TrainingVerbs, CollectiveVerbs, CheckpointVerbs, TrackingVerbs)
    ranks = (SetupAndRanks, ProcessVerbs, Ranks)
    more = (Assignable, Shown, object)
    assert Accelerator.__mro__ == (Accelerator, *ranks, MeshVerbs, *verbs, *more)


@pytest.mark.parametrize(
    "verbs", [PreparedVerbs, TrainingVerbs, CollectiveVerbs, CheckpointVerbs, TrackingVerbs]
)
def test_facade_methods_only_delegate(verbs: type) -> None:
    """Facade methods contain no logic, so readers only have to look at the part that does the work."""
    source = ast.parse(inspect.getsource(verbs)).body[0]
    assert isinstance(source, ast.ClassDef)
    for method in source.body:
        if isinstance(method, ast.FunctionDef) and not method.decorator_list:
            statements = [
                one for one in method.body if not isinstance(getattr(one, "value", 0), ast.Constant)
            ]
            assert len(statements) == 1, method.name
            call = statements[0].value
            assert isinstance(call, ast.Call), method.name
            # `accumulate` creates its context itself, which saves a call in each micro-batch.
            made = ast.unparse(call.func) == "MicroBatch" and method.name == "accumulate"
            assert made or ast.unparse(call.func).endswith(f".{method.name}")
