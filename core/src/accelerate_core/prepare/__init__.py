"""From raw objects to prepared ones: classify, transform in stages, build, rebind."""
