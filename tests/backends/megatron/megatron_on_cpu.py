"""A prelude for the backend test suite: run megatron-core without a GPU."""

import cuda_on_cpu

cuda_on_cpu.install()
