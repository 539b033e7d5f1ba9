"""A run's line in a list, its note, its results of benchmarks."""
