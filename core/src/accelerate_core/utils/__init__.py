"""The public utilities, each imported when it is first used.

`import accelerate_core.utils` imports no torch. What a plugin lends to this namespace is
found through its entry points; without the plugin the error has the pip command.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_OF_MODULE: dict[str, str] = {
    "accelerate_core.utils.verbs": """
        broadcast broadcast_object_list copy_tensor_to_devices gather gather_object
        pad_across_processes reduce synchronize_rng_state synchronize_rng_states
        wait_for_everyone
    """,
    "accelerate_core.utils.models": """
        convert_outputs_to_fp32 extract_model_from_parallel get_grad_scaler
        get_mixed_precision_context_manager has_4bit_bnb_layers is_peft_model
    """,
    "accelerate_core.utils.config": "write_basic_config",
    "accelerate_core.utils.enums": "DynamoBackend SageMakerDistributedType",
    "accelerate_core.utils.progress": "tqdm",
    "accelerate_core.big_model": """
        AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook OffloadedWeightsLoader
        PrefixedDataset SequentialHook UserCpuOffloadHook add_hook_to_module
        attach_align_device_hook attach_align_device_hook_on_blocks
        attach_execution_device_hook attach_layerwise_casting_hooks clean_device_map
        cpu_offload cpu_offload_with_hook disk_offload dispatch_model
        extract_submodules_state_dict get_state_dict_offloaded_model infer_auto_device_map
        init_empty_weights init_on_device load_checkpoint_and_dispatch
        load_checkpoint_in_model load_offloaded_weight load_offloaded_weights
        offload_state_dict offload_weight remove_hook_from_module
        remove_hook_from_submodules save_offload_index
    """,
    "accelerate_core.collectives": """
        CannotPadNestedTensorWarning DistributedOperationException TensorInformation concatenate
        convert_to_fp32 find_batch_size find_device get_data_structure honor_type
        ignorant_find_batch_size initialize_tensors is_namedtuple is_tensor_information
        is_torch_tensor listify pad_input_tensors recursively_apply send_to_device slice_tensors
    """,
    "accelerate_core.compilation": "compile_regions has_compiled_regions is_compiled_module",
    "accelerate_core.helpers.constants": """
        CustomDtype MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME OPTIMIZER_NAME
        PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME
        SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        TORCH_LAUNCH_PARAMS WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
    """,
    "accelerate_core.helpers.environment": """
        CPUInformation are_libraries_initialized check_cuda_fp8_capability
        check_cuda_p2p_ib_support clear_environment convert_dict_to_env_variables
        get_cpu_distributed_information get_current_device_type get_gpu_info get_int_from_env
        parse_choice_from_env parse_flag_from_env patch_environment
        purge_accelerate_environment set_numa_affinity str_to_bool
    """,
    "accelerate_core.helpers.memory": """
        clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size
    """,
    "accelerate_core.helpers.modeling": """
        align_module_device calculate_maximum_sizes check_device_map
        check_tied_parameters_in_config check_tied_parameters_on_same_device
        clean_state_dict_for_safetensors compute_module_sizes
        compute_module_total_buffer_size convert_file_size_to_int dtype_byte_size
        find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory
        has_offloaded_params id_tensor_storage load_state_dict named_module_tensors
        retie_parameters set_module_tensor_to_device shard_state_dict
    """,
    "accelerate_core.helpers.other": """
        check_os_kernel convert_bytes get_free_port get_module_children_bottom_up
        get_pretty_name is_port_in_use load merge_dicts model_has_dtensor recursive_getattr save
    """,
    "accelerate_core.helpers.random": "set_seed",
    "accelerate_core.helpers.versions": "compare_versions is_torch_version",
    "accelerate_core.configuration": """
        AutocastKwargs ComputeEnvironment DataLoaderConfiguration DistributedType
        GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler
        LoggerType ParallelismConfig PrecisionType ProfileKwargs ProjectConfiguration RNGType
        TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig
        TorchTensorParallelPlugin
    """,
    "accelerate_core.utils.probes": """
        is_4bit_bnb_available is_8bit_bnb_available is_amdsmi_available is_bf16_available
        is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available
        is_cuda_available is_datasets_available is_fp16_available is_habana_gaudi1
        is_hpu_available is_import_timer_available is_lomo_available is_matplotlib_available
        is_mlu_available is_mps_available is_musa_available is_neuron_available
        is_npu_available is_numpy_available is_pandas_available is_peft_available
        is_pippy_available is_pynvml_available is_pytest_available is_rich_available
        is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available
        is_timm_available is_torchdata_available is_torchdata_stateful_dataloader_available
        is_torchvision_available is_tqdm_available is_transformers_available
        is_triton_available is_weights_only_available is_xccl_available is_xpu_available
    """,
}
_HOMES = {name: module for module, names in _OF_MODULE.items() for name in names.split()}
_PROBES = "accelerate_core.utils.probes"

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    home = _HOMES.get(name)
    if home is None:
        return _lent(name)
    module = import_module(home)
    value = module.probe(name) if home == _PROBES else getattr(module, name)
    globals()[name] = value
    return value


def _lent(name: str) -> Any:
    """Return what a plugin lends under a name."""
    from accelerate_core.errors import did_you_mean
    from accelerate_core.plugins import exports

    try:
        return exports.resolve(name)
    except AttributeError as error:
        if str(error) != name:  # it says more
            raise
        raise AttributeError(
            f"module 'accelerate_core.utils' has no attribute {name!r}."
            f"{did_you_mean(name, __dir__())}"
        ) from None


def __dir__() -> list[str]:
    from accelerate_core.plugins import exports

    return sorted({*globals(), *_HOMES, *exports.exported_names()})
