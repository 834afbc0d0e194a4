"""`accelerate.commands.config.config_args`, served by accelerate-core."""

from accelerate_drop_in.serving import serve

serve(__name__)
