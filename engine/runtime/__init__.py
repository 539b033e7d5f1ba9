"""The runtime runs a plan: host planes, device buffers, lanes, kernels, the streaming engine, and
sampling through it.

It may import the rooms before it in `engine`, up to `fit`.
"""
