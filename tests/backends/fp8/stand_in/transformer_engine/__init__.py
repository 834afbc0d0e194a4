"""What accelerate-fp8 uses of Transformer Engine's public surface, computed plainly on any device.

The recipes are the library's own file. Signatures and attributes are held to the library's source
by a test. The arithmetic of layers is torch's, with inputs and weights rounded to fp8; how scales
move, are reduced, kept for a second forward and pickled follows the library's source.
"""
