"""MLflow for accelerate-core."""

from accelerate_mlflow.tracker import MLflowTracker

__all__ = ["MLflowTracker"]
__version__ = "0.1.0"
