"""Lets all layers of the suite's model compute in fp8, also the first, the last and small ones."""

from accelerate_fp8 import layers

layers.usual_filter = lambda _: lambda *_: True
