"""Everything about a run that is computed without torch: where parameters are, what a model takes,
the ops of a step, and whether it all fits.
"""
