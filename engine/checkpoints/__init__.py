"""A run takes weights and states from here and leaves them here: pretrained weights, checkpoints,
the export.

It may import the rooms before it in `engine`, up to `runtime`.
"""
