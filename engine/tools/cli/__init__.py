"""The commands of `launch.py`, and their texts for a terminal."""
