"""Lets the layers of the suite's model compute in fp8: it has a first and a last one, and small ones."""

from accelerate_fp8 import layers

layers.usual_filter = lambda _: lambda *_: True
