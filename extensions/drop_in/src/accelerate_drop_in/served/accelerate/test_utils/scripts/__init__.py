"""Scripts to launch. They exit with a status above 0 if a check fails."""
