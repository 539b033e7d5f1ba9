"""The ranks of a run exchange weights and sums here, by PyTorch's process groups.

The room may import the rooms before it in `engine`, up to `graphs`.
"""
