"""Makes every process of a suite train with the mock of MS-AMP."""

import sys
from pathlib import Path

from accelerate_fp8.msamp import MSAMP

sys.path.insert(0, str(Path(__file__).with_name("mock_libraries")))
MSAMP.devices = ("cpu",)
