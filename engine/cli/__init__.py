"""Text for a terminal is made in this room: `launch.py` prints it.

It may import every other room of `engine`.
"""
