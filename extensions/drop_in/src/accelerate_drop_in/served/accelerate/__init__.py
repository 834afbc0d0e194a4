"""`accelerate`, served by accelerate-core."""

from accelerate_drop_in import VERSION as __version__  # noqa: F401
from accelerate_drop_in.serving import serve

serve(__name__)
