"""Run models that are larger than one device: empty weights, device maps, dispatch and offload."""

#: How accelerators share a model: evenly, with little on the first one, or filled one by one.
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
