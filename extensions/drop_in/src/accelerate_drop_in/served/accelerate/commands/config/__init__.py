"""`accelerate.commands.config`, served by accelerate-core."""

from accelerate_drop_in.serving import serve

serve(__name__)
