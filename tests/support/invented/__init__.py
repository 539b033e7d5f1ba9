"""Data sets are invented: rows of any format, changed and damaged, in a file of any kind."""
