"""A run is told of here without folding its whole record: its line in a list, its small curve, what
a person wrote about it, its curves as CSV, and what benchmarks said of its weights.
"""
