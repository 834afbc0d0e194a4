"""Run a script with megatron-core without a GPU: `run_on_cpu.py SCRIPT ARGUMENTS`."""

import runpy
import sys

import cuda_on_cpu

cuda_on_cpu.install()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
