"""`python -m accelerate_core.cli`."""

from accelerate_core.cli import main

if __name__ == "__main__":
    main()
