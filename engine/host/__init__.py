"""The room keeps the planes of every unit in host memory, and has the kernels that update them
there: AdamW, and the forms in which its moments are kept.

The room may import the rooms before it in `engine`, up to `fit`.
"""
