"""Ranks, collectives, loaders, training and saving: the checks of `accelerate test`."""

import os

from accelerate_launch.commands import self_check


def main():
    if self_check.main(os.devnull):
        raise AssertionError("A check failed. Run `accelerate test` to see which.")


if __name__ == "__main__":
    main()
