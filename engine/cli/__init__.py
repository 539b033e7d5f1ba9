"""Text for a terminal: what `launch.py` prints.

It may import every other room of `engine`.
"""
