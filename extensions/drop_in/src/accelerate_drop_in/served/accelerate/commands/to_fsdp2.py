"""`accelerate.commands.to_fsdp2`, served by accelerate-core."""

from accelerate_drop_in.serving import serve

serve(__name__)
