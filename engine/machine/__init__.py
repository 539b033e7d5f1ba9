"""This machine and known ones: memory, GPUs, limits, and how fast they are. No torch.

It may import the rooms before it in `engine`, up to `config`.
"""
