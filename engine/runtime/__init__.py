"""The runtime runs a plan: device buffers, lanes, kernels, the streaming engine, and sampling
through it.

It may import the rooms before it in `engine`, up to `host`.
"""
