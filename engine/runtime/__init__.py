"""The runtime runs a plan: device buffers, lanes, kernels and the streaming engine.

It may import the rooms before it in `engine`, up to `graphs`.
"""
