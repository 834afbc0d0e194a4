"""`accelerate.test_utils`, served by accelerate-core."""

from accelerate.test_utils.scripts import test_ops, test_script, test_sync  # noqa: F401
from accelerate_drop_in.serving import serve

serve(__name__)
