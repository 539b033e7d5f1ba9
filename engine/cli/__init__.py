"""Text for a terminal is made in this room, and `launch.py` prints it.

It may import every other room of `engine`.
"""
