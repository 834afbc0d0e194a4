"""Like `parity_worker.py`, with a Mixtral, whose routers also add a loss for each half of a batch."""

from parity_worker import main

if __name__ == "__main__":
    main("mixtral", 2)
