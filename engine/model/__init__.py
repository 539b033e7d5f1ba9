"""These modules find a Hugging Face model, download it, split it into units, test it in trials, and
capture the arguments of its blocks. They also measure its shape for the planner.

The room may import the rooms before it in `engine`, up to `data`.
"""
