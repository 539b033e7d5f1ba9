"""Weights and states, into a run and out of it: pretrained weights, checkpoints, the export.

It may import the rooms before it in `engine`, up to `runtime`.
"""
