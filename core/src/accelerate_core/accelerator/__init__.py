"""The facade, and its parts that belong to no other package."""

from accelerate_core.accelerator.accelerator import Accelerator as Accelerator
