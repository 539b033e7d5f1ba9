"""Benchmarks of lm-evaluation-harness, asked of the weights of a run."""
