"""The process's runtime, and collectives on flat tensors and nested structures.

`process` starts and ends the runtime, and checks that all ranks are configured alike. Importing it
does not import torch. `communicator` has the collectives of one group on flat tensors, over the hooks of a
backend or `torch_collectives`. `collectives` has those on nested structures: `tree` walks a structure, and
`packing` packs its tensors into bytes.
"""
