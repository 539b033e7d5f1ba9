"""The files here read and write the weights and states of runs: pretrained weights, checkpoints,
the export.

It may import the rooms before it in `engine`, up to `runtime`.
"""
