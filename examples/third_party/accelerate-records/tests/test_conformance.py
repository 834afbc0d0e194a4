"""The conformance suite, with one and two processes."""

import os
from pathlib import Path

from accelerate_testing import LoadersSuite


class TestRecords(LoadersSuite):
    plugin = "records"
    options = {"make": "making:make"}
    environ = {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        )
    }
