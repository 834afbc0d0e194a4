"""Several processes: who they are, what they say to each other, and structures of tensors.

`process` starts and ends them and needs no torch to be read; `rank_agreement` compares what they
are about to run. `communicator` is one group as seen by one rank, on flat tensors, over a
backend's hooks or `torch_collectives`; `collectives` are the verbs on nested structures, which
`tree` walks, `packing` turns into bytes, and `verify` compares in debug mode.
"""
