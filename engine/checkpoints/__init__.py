"""These modules read and write the weights and states of runs: pretrained weights, checkpoints and
the export.

The room may import the rooms before it in `engine`, up to `sampling`.
"""
