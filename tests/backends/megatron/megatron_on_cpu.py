"""A prelude of the author's suite: megatron-core where there is no GPU."""

import cuda_on_cpu

cuda_on_cpu.install()
