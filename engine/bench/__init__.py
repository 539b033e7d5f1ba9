"""A benchmark shows how near the engine comes to what this machine can do. It takes steps on random
weights, runs the same training with all states on the device, and prints the figures as tables.
`engine.runtime.ceilings` measures what the machine can do.

It may import the rooms before it in `engine`, up to `talk`.
"""
