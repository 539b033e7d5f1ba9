"""Runs: the queue, the list of runs, and their comparison."""
