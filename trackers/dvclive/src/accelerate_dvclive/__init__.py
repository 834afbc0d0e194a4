"""DVCLive for accelerate-core."""

from accelerate_dvclive.tracker import DVCLiveTracker

__all__ = ["DVCLiveTracker"]
__version__ = "0.1.0"
