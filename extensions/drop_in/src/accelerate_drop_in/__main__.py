"""`python -m accelerate_drop_in script.py [arguments]`."""

from accelerate_drop_in import main

main()
