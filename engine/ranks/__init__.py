"""Several ranks compute one run: this process leads, and starts one process more for each further
device.

The room may import the rooms before it in `engine`, up to `memory`.
"""
