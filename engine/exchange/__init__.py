"""Ranks of a run exchange weights and sums: this room sends them, by PyTorch's process groups.

The room may import the rooms before it in `engine`, up to `graphs`.
"""
