"""CUDA graphs: the kernels of a block are recorded once and launched together from then on.

It may import the rooms before it in `engine`, up to `host`.
"""
