"""What clients of Accelerate replace or read, for the generated page `drop_in.md`."""

from __future__ import annotations

#: Client and version, what it replaces or reads, and what becomes of it.
CLIENTS = [
    (
        "transformers 5.23",
        "replaces `big_modeling.check_device_map` for a while; pickles `PartialState`",
        "honoured; pickled by its public name",
    ),
    (
        "axolotl 0.19",
        "replaces `accelerator.fsdp2_prepare_model`, `prepare_data_loader` (in `data_loader` and "
        "`accelerator`), `Accelerator.clip_grad_norm_`",
        "honoured",
    ),
    (
        "axolotl 0.19",
        "replaces `ParallelismConfig.__post_init__`, `total_size`, `dp_dim_names`, "
        "`dp_shard_cp_dim_names`, `non_dp_dim_names`, `_get_mesh`, `_validate_accelerator`, and adds "
        "`ep` to `_sizes`",
        "honoured; an error for `ep_size` above 1",
    ),
    (
        "axolotl 0.19",
        "replaces `Accelerator._prepare_cp`, `accelerator.convert_model_to_fp8_ao`; before 0.13 also "
        "`fsdp_utils.fsdp2_load_full_state_dict`",
        "a warning",
    ),
    (
        "unsloth 2026.10",
        "replaces `accelerator.fsdp2_prepare_model`, `Accelerator.__init__`, `prepare`, `prepare_model`, "
        "`prepare_data_loader`, `prepare_optimizer`, `clip_grad_norm_`, `get_state_dict`, `save_state`, "
        "`load_state`, `distributed_type`",
        "honoured",
    ),
    (
        "unsloth 2026.10",
        "replaces `Accelerator.no_sync`, `operations.recursively_apply`, "
        "`fsdp_utils._get_model_state_dict` and `_set_model_state_dict`, `is_wandb_available`",
        "a warning; other clients that call these functions use the replacement",
    ),
    (
        "unsloth 2026.10",
        "replaces `PartialState._prepare_backend` and `TorchDynamoPlugin.to_kwargs`",
        "a warning if the result would differ: on one process the run has no process group anyway, and "
        "the compiler gets the plugin's fields",
    ),
    (
        "unsloth 2026.10",
        "reads `Accelerator.__dict__['state']`, `hooks._accelerate_added_attributes`, and the text of "
        "`utils/fsdp_utils.py` to see whether FSDP2 is supported",
        "served",
    ),
    (
        "ms-swift 4.6",
        "replaces `Accelerator.verify_device_map`, `__init__`, `clip_grad_norm_`, `_prepare_fsdp2`, "
        "`fsdp_utils.fsdp2_prepare_model`, `big_modeling.attach_align_device_hook_on_blocks`; reads "
        "`accelerator.torch` to replace DDP's constructor",
        "honoured",
    ),
    ("LLaMA-Factory 0.9.5", "replaces `Accelerator.__init__`", "honoured"),
    ("finetrainers 0.2", "reads `data_loader.DataLoader`", "served"),
    (
        "trl 1.16, peft 0.21, diffusers 0.42, sentence-transformers 6.2, lm_eval 0.4.13, lerobot 0.4.4",
        "replace nothing",
        "",
    ),
]

INTRODUCTION = """\
Libraries replace functions and methods of Accelerate. A replacement is called wherever ours has the same
job: by `prepare`, or by other functions of the same module. If our code does not call the function, and
Accelerate's does, a warning names the function and the line that replaced it. Libraries also read names
that Accelerate's modules only import, such as `accelerate.accelerator.torch`; these are served too.

What the sources of these clients replace or read:
"""

TESTS = """\
269 tests in Accelerate 1.15's source distribution pass with Accelerate on a CPU. `make soak` runs them
here. These are expected to fail, and any other failure is an error:
"""
