"""The step: optimizer and scheduler wrappers, accumulation, mixed precision forward."""
