"""Models larger than one device: empty weights, device maps, dispatching, offloading."""

#: How accelerators share a model: evenly, the first one spared, or one full after the other.
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
