"""Models larger than one device: empty weights, device maps, dispatching, offloading."""
