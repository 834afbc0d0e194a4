"""`accelerate.utils.fsdp_utils`, served by accelerate-core.

These functions are written here, because libraries look for them in the text of this file.
"""

from accelerate_drop_in.serving import serve

serve(__name__)


def fsdp2_prepare_model(accelerator, model):
    """Shard one model. Within `prepare`, continue with the step that a client's replacement has begun."""
    from accelerate_core import utils
    from accelerate_drop_in.continuation import continuation

    return (continuation() or utils.fsdp2_prepare_model)(accelerator, model)


def _prepare_sd_options(fsdp_plugin):
    """Return torch's options for the state dict of a sharded model: `full_state_dict` by the plugin."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    whole = "FULL" in str(fsdp_plugin.state_dict_type).upper()
    return StateDictOptions(full_state_dict=whole, cpu_offload=whole, broadcast_from_rank0=whole)


def _get_model_state_dict(model, adapter_only=False, sd_options=None):
    """Return the state dict of a model, or of its adapter. With `full_state_dict`, weights are gathered."""
    from dataclasses import replace

    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from accelerate.utils import is_peft_model

    options = sd_options or StateDictOptions()
    if adapter_only and is_peft_model(model):
        options = replace(options, ignore_frozen_params=True)
    return get_model_state_dict(model, options=options)


def _set_model_state_dict(model, state_dict, adapter_only=False, sd_options=None):
    """Load what `_get_model_state_dict` returned."""
    from dataclasses import replace

    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from accelerate.utils import is_peft_model

    options = sd_options or StateDictOptions()
    if adapter_only and is_peft_model(model):
        options = replace(options, strict=False)
    return set_model_state_dict(model, state_dict, options=options)
