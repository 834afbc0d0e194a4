"""Compare the settings and the schedule with megatron-core itself, on one rank."""

from __future__ import annotations

import math
import warnings
from datetime import timedelta

import cuda_on_cpu

cuda_on_cpu.install()

import indexed  # noqa: E402
import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from worker import PG_TIMEOUT, case, run_cases, scratch  # noqa: E402

from accelerate_core import InitProcessGroupKwargs  # noqa: E402
from accelerate_core.errors import ConfigurationError  # noqa: E402
from accelerate_megatron.library import imported  # noqa: E402
from accelerate_megatron.scheduler import (  # noqa: E402
    MegatronLMDummyScheduler,
    MegatronScheduler,
    build_scheduler,
)
from accelerate_megatron.settings import _SET_BY, MegatronLMPlugin  # noqa: E402

CPU = not torch.cuda.is_available()
SMALL = {"num_layers": 4, "num_attention_heads": 4, "hidden_size": 32}


def config(**options):
    make = imported("transformer.transformer_config").TransformerConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**{**SMALL, "pipeline_dtype": torch.float32, **options})


@case
def the_plugin_sets_megatrons_config() -> None:
    plugin = MegatronLMPlugin(
        tp_degree=2, pp_degree=2, sequence_parallelism=True, recompute_granularity="full",
        attention_backend="auto", attention_dropout=0.0, hidden_dropout=0.25,
        num_layers_per_virtual_pipeline_stage=1,
        other_megatron_args={"qk_layernorm": True, "init_method_std": 0.01},
    )  # fmt: skip
    made = config(**plugin.transformer_options(plugin.sizes(num_layers=4)))
    assert made.tensor_model_parallel_size == made.pipeline_model_parallel_size == 2
    assert made.virtual_pipeline_model_parallel_size == 2
    assert (made.overlap_p2p_comm, made.batch_p2p_comm) == (True, False)
    assert made.attention_backend.name == "auto"
    assert (made.recompute_method, made.recompute_num_layers) == ("uniform", 1)
    assert (made.qk_layernorm, made.init_method_std) == (True, 0.01)
    assert config(**MegatronLMPlugin().transformer_options()).attention_dropout == 0.1
    plugin = MegatronLMPlugin(recompute_activations=True, attention_backend="unfused")
    assert config(**plugin.transformer_options()).recompute_granularity == "selective"
    plugin = MegatronLMPlugin(pp_degree=2, decoder_last_pipeline_num_layers=1)
    assert config(**plugin.transformer_options()).num_layers_in_last_pipeline_stage == 1
    optimizer = imported("optimizer").OptimizerConfig
    assert optimizer(**MegatronLMPlugin(gradient_clipping=2).optimizer_options()).clip_grad == 2
    assert optimizer(**MegatronLMPlugin().optimizer_options()).clip_grad == 0


@case
def unknown_options_are_rejected() -> None:
    fields = imported("transformer.transformer_config").TransformerConfig.__dataclass_fields__
    assert fields.keys() >= _SET_BY.keys()
    for given, said in {
        "qk_layernrom": "Did you mean 'qk_layernorm'",
        "vocab_size": "passed to prepare",
        "tensor_model_parallel_size": "set by tp_degree",
        "bf16": "set by mixed_precision",
        "train_iters": "a field of MegatronLMPlugin",
        "batch_p2p_comm": "the backend",
    }.items():
        with pytest.raises(ConfigurationError, match=said):
            MegatronLMPlugin(other_megatron_args={given: True})


def adam(**more):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:], "lr": 0.5, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1, **more)


def rates(plugin, dummy=None, steps=4, **more) -> tuple[list[list[float]], MegatronScheduler]:
    scheduler = build_scheduler(plugin, adam(), dummy, **more)
    seen = [scheduler.get_last_lr()]
    for _ in range(steps):
        scheduler.step()
        seen.append(scheduler.get_last_lr())
    return seen, scheduler


@case
def each_group_decays_from_its_own_learning_rate() -> None:
    seen, _ = rates(MegatronLMPlugin(train_iters=4))
    assert seen == [[1.0, 0.5], [0.75, 0.375], [0.5, 0.25], [0.25, 0.125], [0.0, 0.0]]
    seen, _ = rates(MegatronLMPlugin(train_iters=4, lr_warmup_iters=2, min_lr=0.25))
    assert seen == [[0.0, 0.0], [0.5, 0.25], [1.0, 0.5], [0.625, 0.375], [0.25, 0.25]]
    seen, _ = rates(MegatronLMPlugin(train_iters=4, lr_warmup_fraction=0.5))
    assert [row[0] for row in seen] == [0.0, 0.5, 1.0, 0.5, 0.0]
    seen, _ = rates(MegatronLMPlugin(train_iters=9, lr_decay_iters=4, lr_decay_style="cosine"))
    assert math.isclose(seen[1][0], 0.5 * (math.cos(math.pi / 4) + 1))
    seen, _ = rates(MegatronLMPlugin(lr_decay_style="constant", lr_warmup_iters=2), steps=3)
    assert [row[0] for row in seen] == [0.0, 0.5, 1.0, 1.0]
    seen, _ = rates(MegatronLMPlugin(train_iters=4, lr_decay_style="inverse-square-root"))
    assert seen[4][0] == 0.5


@case
def the_schedule_can_count_samples_or_the_scripts_steps() -> None:
    plugin = MegatronLMPlugin(train_samples=64, lr_warmup_samples=32)
    seen, _ = rates(plugin, samples_per_step=16)
    assert [row[0] for row in seen] == [0.0, 0.5, 1.0, 0.5, 0.0]
    dummy = MegatronLMDummyScheduler(adam(), total_num_steps=8, warmup_num_steps=4)
    seen, _ = rates(MegatronLMPlugin(), dummy, data_ranks=2)
    assert [row[0] for row in seen] == [0.0, 0.5, 1.0, 0.5, 0.0]
    again, _ = rates(MegatronLMPlugin(train_iters=4), dummy, data_ranks=2)
    assert again == seen


@case
def weight_decay_increases_in_groups_that_have_one() -> None:
    _, scheduler = rates(MegatronLMPlugin(train_iters=4), steps=2)
    groups = scheduler.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    plugin = MegatronLMPlugin(
        train_iters=4,
        weight_decay_incr_style="linear",
        start_weight_decay=0.0,
        end_weight_decay=0.5,
    )
    _, scheduler = rates(plugin, steps=2)
    groups = scheduler.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


@case
def a_schedule_continues_from_its_saved_state() -> None:
    plugin = MegatronLMPlugin(train_iters=8, lr_warmup_iters=2)
    seen, first = rates(plugin, steps=5)
    _, second = rates(plugin, steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == seen[-1]
    first.step()
    second.step()
    assert second.get_last_lr() == first.get_last_lr()
    other = build_scheduler(MegatronLMPlugin(train_iters=16), adam())
    with pytest.warns(UserWarning, match="lr_decay_steps is 8 instead of 16"):
        other.load_state_dict(first.state_dict())
    assert other.get_last_lr() == first.get_last_lr()
    assert all(isinstance(value, int | float | str) for value in first.state_dict().values())


@case
def invalid_schedules_are_rejected() -> None:
    eight = MegatronLMDummyScheduler(adam(), total_num_steps=8)
    for plugin, dummy, said in (
        (MegatronLMPlugin(), None, "length of the schedule"),
        (MegatronLMPlugin(), MegatronLMDummyScheduler(adam()), "length of the schedule"),
        (
            MegatronLMPlugin(lr_decay_style="constant", lr_warmup_fraction=0.5),
            None,
            "length of the schedule",
        ),
        (MegatronLMPlugin(train_iters=4, lr_warmup_samples=8), None, "Use only one kind"),
        (MegatronLMPlugin(train_samples=4), None, "the number of samples per step is unknown"),
        (MegatronLMPlugin(train_samples=4), eight, "Leave one of them out"),
        (MegatronLMPlugin(train_iters=5), eight, "train_iters=5 .* which is 8 steps"),
        (MegatronLMPlugin(train_iters=4, lr_warmup_iters=4), None, "must be shorter"),
        (MegatronLMPlugin(train_iters=4, min_lr=0.75), None, "min_lr=0.75 is greater than"),
        (
            MegatronLMPlugin(train_iters=4, lr_warmup_iters=1, lr_warmup_fraction=0.5),
            None,
            "both set",
        ),
        (MegatronLMPlugin(train_iters=4, start_weight_decay=0.1), None, "differ"),
        (MegatronLMPlugin(train_iters=4, weight_decay_incr_style="linear"), None, "needs start_"),
        (
            MegatronLMPlugin(
                train_iters=4, weight_decay_incr_style="cosine", start_weight_decay=0.2,
                end_weight_decay=0.1,
            ),
            None,
            "can only increase",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=said):
            build_scheduler(plugin, adam(), dummy)
    with pytest.raises(ConfigurationError, match="Did you mean 'lr_decay_style'"):
        MegatronLMDummyScheduler(adam(), lr_decay_styl="linear")


@case
def the_drop_in_runs_the_step_and_counts_batches_like_accelerate() -> None:
    import accelerate_drop_in

    accelerate_drop_in.install()
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMPlugin as Served

    assert Served is MegatronLMPlugin
    for given, held in (({}, [True, True]), ({"multiply_batch": False}, [True, False])):
        accelerator = Accelerator(
            cpu=CPU,
            megatron_lm_plugin=MegatronLMPlugin(**given),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=PG_TIMEOUT))],
        )
        plugin = accelerator.state.megatron_lm_plugin
        assert [plugin.forward_runs_step, plugin.multiply_batch] == held
        accelerator.end_training()
    accelerate_drop_in.uninstall()


@case
def the_drop_in_reads_indexed_data_like_accelerate() -> None:
    """Like Accelerate's own script: the placeholder passed three times, next(), model(**batch)."""
    import accelerate_drop_in

    accelerate_drop_in.install()
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMDummyDataLoader

    accelerator = Accelerator(
        cpu=CPU,
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, eval_iters=2, eval_interval=2),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=PG_TIMEOUT))],
    )
    rows = MegatronLMDummyDataLoader(
        data_path=indexed.write(accelerator, scratch("peer")),
        splits_string="90,5,5",
        seq_length=tiny.LENGTH,
        micro_batch_size=2,
    )
    plugin = accelerator.state.megatron_lm_plugin
    plugin.megatron_dataset_flag = True
    model = tiny.tiny(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=4)
    model, optimizer, schedule, train, valid, _ = accelerator.prepare(
        model, optimizer, schedule, rows, rows, rows
    )
    losses = []
    for number in range(4):
        model.train()
        batch = next(train)
        assert batch["tokens"].shape == (4, tiny.LENGTH)
        losses.append(model(**batch).loss)
        accelerator.backward(losses[-1])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if number % plugin.eval_interval == 0:
            for _ in range(plugin.eval_iters):
                model.eval()
                with torch.no_grad():
                    model(**next(valid))
    assert losses[-1] < losses[0]
    assert (len(train), len(valid)) == (4, 6)
    assert optimizer.param_groups[0]["lr"] == 0
    accelerator.end_training()
    accelerate_drop_in.uninstall()


if __name__ == "__main__":
    run_cases()
