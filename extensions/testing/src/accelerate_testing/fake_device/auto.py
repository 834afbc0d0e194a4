"""Installs the fake device when it is imported, for `--prelude` and `python -c`."""

from accelerate_testing import fake_device

fake_device.install()
