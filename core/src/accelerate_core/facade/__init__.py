"""The parts of `Accelerator`, one per concern; the class itself is in `accelerator`."""
