"""Several processes: who they are, what they say to each other, and structures of tensors.

`process` starts and ends them, compares what they are about to run, and needs no torch to be read.
`communicator` is one group as seen by one rank, on flat tensors, over a backend's hooks or
`torch_collectives`; `collectives` are the verbs on nested structures, which `tree` walks and
`packing` turns into bytes.
"""
