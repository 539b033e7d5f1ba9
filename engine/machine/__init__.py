"""A machine has memory, GPUs, limits and rates. This room reads those of the machine that it runs
on, and has the data of known machines. It does not import torch.

It may import the rooms before it in `engine`, up to `config`.
"""
