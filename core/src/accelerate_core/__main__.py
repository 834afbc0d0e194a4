"""Run the command line with `python -m accelerate_core`."""

from accelerate_core.cli import main

if __name__ == "__main__":
    main()
