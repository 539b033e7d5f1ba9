"""The planes of every unit in host memory, and the kernels that update them there: AdamW, and the
forms in which its moments are kept.

The room may import the rooms before it in `engine`, up to `fit`.
"""
