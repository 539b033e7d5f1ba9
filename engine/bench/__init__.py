"""A benchmark shows how close the engine comes to the highest rates of this machine. It runs steps
on random weights, runs the same training with all states on the device, and prints the figures as
tables. `engine.measuring.ceilings` measures those rates.

It may import the rooms before it in `engine`, up to `talk`.
"""
