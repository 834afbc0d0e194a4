"""From raw objects to prepared ones: classify, transform in stages, build, rebind."""

from accelerate_core.prepare.classify import classify
from accelerate_core.prepare.plan import Entry, PreparePlan
from accelerate_core.prepare.run import prepare

__all__ = ["Entry", "PreparePlan", "classify", "prepare"]
