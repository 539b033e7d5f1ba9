"""A watch follows one run. It prepares what the pages of the run draw, beyond its figures: what
the run is doing before its first step, what came of it, and its log.
"""
