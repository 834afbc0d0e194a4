"""A mock of the part of Transformer Engine that accelerate-fp8 uses. It runs on any device.

The recipes come from the library's own file. A test compares signatures and attributes with the
library's source. Layers compute with torch, with inputs and weights rounded to fp8. Updating,
reducing and pickling scales, and keeping them for a second forward, follows the library's source.
"""
