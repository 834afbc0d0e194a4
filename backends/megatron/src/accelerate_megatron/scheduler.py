"""megatron-core's schedule of learning rate and weight decay, and its placeholder in a script."""

from __future__ import annotations

from typing import Any

from accelerate_core.plugin import ConfigurationError, did_you_mean, listing, warn
from accelerate_megatron.library import imported
from accelerate_megatron.settings import MegatronLMPlugin

#: Settings of a schedule, counted in optimizer steps, and in samples.
_STEPS = ("train_iters", "lr_decay_iters", "lr_warmup_iters")
_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples")


class MegatronLMDummyScheduler:
    """A placeholder for megatron-core's schedule, which `MegatronLMPlugin` describes.

    Args:
        optimizer: the optimizer of the schedule.
        total_num_steps: total number of steps, if the plugin has no `train_iters`.
        warmup_num_steps: number of warm-up steps, if the plugin doesn't define them.
        kwargs: not supported. The plugin defines the shape of the schedule.

    Give both numbers of steps as for one process. They are divided by the number of ranks that read
    different samples.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            known = ["total_num_steps", "warmup_num_steps", *MegatronLMPlugin.__dataclass_fields__]
            raise ConfigurationError(
                f"MegatronLMDummyScheduler has no argument {name!r}, only total_num_steps and "
                "warmup_num_steps. Set the shape of the schedule (lr_decay_style, min_lr, ...) in "
                f"MegatronLMPlugin.{did_you_mean(name, known)}"
            )
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronScheduler:
    """megatron-core's `OptimizerParamScheduler`, stepped once per optimizer step.

    Each group's learning rate decreases from its initial value to `min_lr`. Each group keeps its
    weight decay, unless the plugin defines one.
    """

    def __init__(self, inner: Any, increment: int) -> None:
        self.inner = inner
        self._increment = increment

    @property
    def optimizer(self) -> Any:
        """The optimizer whose groups are updated."""
        return self.inner.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.inner.optimizer = optimizer
        self.inner.step(0)

    def step(self) -> None:
        """Advance by one optimizer step, or by its samples if the schedule counts samples."""
        self.inner.step(self._increment)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.inner.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and shape of the schedule, as numbers and strings."""
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the saved schedule, and warn if its shape differs from the current settings."""
        now = self.inner.state_dict()
        changed = [name for name in now if name != "num_steps" and now[name] != state.get(name)]
        if changed:
            values = ", ".join(
                f"{name} is {state.get(name)!r} instead of {now[name]!r}" for name in changed
            )
            warn(f"The saved schedule replaces the settings of this run: {values}.")
        self.inner.num_steps = 0  # loading adds to this number
        self.inner.load_state_dict(state)
        self.inner.step(0)  # update weight decay, which is loaded after the groups are set


def build_scheduler(
    plugin: MegatronLMPlugin,
    optimizer: Any,
    dummy: MegatronLMDummyScheduler | None = None,
    *,
    data_ranks: int = 1,
    samples_per_step: int | None = None,
) -> MegatronScheduler:
    """Create megatron-core's schedule from the plugin's fields.

    Args:
        optimizer: an object with `param_groups`, to which the schedule's initial values are added.
        dummy: the placeholder that the script passed to `prepare`.
        data_ranks: the placeholder's numbers are divided by this. It is the number of ranks that
            read different samples, or 1 with `split_batches`.
        samples_per_step: samples per optimizer step on all ranks, needed if the plugin counts
            samples.

    Raises:
        ConfigurationError: the length is unknown or defined twice, or the plugin's fields contradict
            each other.
    """
    total, decay, warmup = _by_steps_or_samples(plugin, dummy, data_ranks)
    counts_samples = any(getattr(plugin, name) is not None for name in _SAMPLES)
    if counts_samples and samples_per_step is None:
        raise ConfigurationError(
            "The schedule counts samples, but the number of samples per step is unknown. Use "
            f"{listing(_STEPS)} instead."
        )
    constant = plugin.lr_decay_style == "constant" and plugin.lr_warmup_fraction is None
    decay = decay or total
    if (decay is None and not constant) or (
        total is None and plugin.weight_decay_incr_style != "constant"
    ):
        raise ConfigurationError(
            "The length of the schedule is not defined. Set train_iters or train_samples of "
            "MegatronLMPlugin, or MegatronLMDummyScheduler(total_num_steps=...)."
        )
    decay = decay or (warmup or 0) + 1  # a constant learning rate has no end
    if plugin.lr_warmup_fraction is not None:
        if warmup:
            raise ConfigurationError(
                f"lr_warmup_fraction={plugin.lr_warmup_fraction} and a warm-up of {warmup} are both "
                "set. Leave one of them out."
            )
        warmup = int(plugin.lr_warmup_fraction * decay)
    warmup = warmup or 0
    if warmup >= decay:
        raise ConfigurationError(
            f"The warm-up of {warmup} must be shorter than the {decay} until min_lr is reached. "
            "Shorten the warm-up."
        )
    start, end = _weight_decay(plugin)
    groups = optimizer.param_groups
    for group in groups:
        if plugin.min_lr > group["lr"]:
            raise ConfigurationError(
                f"min_lr={plugin.min_lr} is greater than a group's learning rate, {group['lr']}. "
                "Lower min_lr."
            )
        group["max_lr"] = group["lr"]
        group["min_lr"] = plugin.min_lr
        own = group.get("weight_decay", 0.0)
        group["start_wd"] = own if start is None or own == 0 else start
        group["end_wd"] = own if end is None or own == 0 else end
    inner = imported("optimizer_param_scheduler").OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=max((group["lr"] for group in groups), default=plugin.min_lr),
        min_lr=plugin.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=plugin.lr_decay_style,
        start_wd=start or 0.0,
        end_wd=end or 0.0,
        wd_incr_steps=total or decay,
        wd_incr_style=plugin.weight_decay_incr_style,
    )
    return MegatronScheduler(inner, (samples_per_step if counts_samples else None) or 1)


def _by_steps_or_samples(
    plugin: MegatronLMPlugin, dummy: MegatronLMDummyScheduler | None, data_ranks: int
) -> tuple[int | None, int | None, int | None]:
    """Return the lengths of training, of the learning rate's decay, and of the warm-up."""
    steps, samples = (
        {name: getattr(plugin, name) for name in names if getattr(plugin, name) is not None}
        for names in (_STEPS, _SAMPLES)
    )
    if steps and samples:
        raise ConfigurationError(
            f"{listing(steps)} count optimizer steps, but {listing(samples)} count samples. Use only "
            "one kind."
        )
    given = [] if dummy is None else [("total_num_steps", dummy.total_num_steps)]
    given += [] if dummy is None else [("warmup_num_steps", dummy.warmup_num_steps or None)]
    shares = {name: -(-count // data_ranks) for name, count in given if count is not None}
    if samples and shares:
        raise ConfigurationError(
            f"{listing(samples)} of MegatronLMPlugin count samples, but "
            f"MegatronLMDummyScheduler({next(iter(shares))}=...) counts steps. Leave one of them out."
        )
    names = _SAMPLES if samples else _STEPS
    made: list[int | None] = [getattr(plugin, name) for name in names]
    for index, name in ((0, "total_num_steps"), (2, "warmup_num_steps")):
        share = shares.get(name)
        if share is not None and made[index] not in (None, share):
            raise ConfigurationError(
                f"{names[index]}={made[index]} of MegatronLMPlugin contradicts "
                f"MegatronLMDummyScheduler({name}=...), which is {share} steps on each of {data_ranks} "
                "data ranks. Leave one of them out."
            )
        made[index] = made[index] if share is None else share
    return made[0], made[1], made[2]


def _weight_decay(plugin: MegatronLMPlugin) -> tuple[float | None, float | None]:
    """Return the initial and final weight decay, or None if each group keeps its own."""
    start, end = plugin.start_weight_decay, plugin.end_weight_decay
    style = plugin.weight_decay_incr_style
    if style == "constant":
        if start != end:
            raise ConfigurationError(
                f"start_weight_decay={start} and end_weight_decay={end} differ, but "
                "weight_decay_incr_style is 'constant'. Use 'linear' or 'cosine', or leave them out."
            )
    elif start is None or end is None:
        raise ConfigurationError(
            f"weight_decay_incr_style={style!r} needs start_weight_decay and end_weight_decay."
        )
    elif end < start:
        raise ConfigurationError(
            f"start_weight_decay={start} is greater than end_weight_decay={end}, but weight decay can "
            "only increase. Swap them."
        )
    return start, end
