"""Scripts to launch, which end with a status above 0 where something is not as it should be."""
