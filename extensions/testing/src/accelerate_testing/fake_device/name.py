"""The type of the fake device, as in `torch.device("fake")`."""

from __future__ import annotations

NAME = "fake"
