"""The weights in the files of a model, as they were published: which tensors a file has, of which
type, and how their values are read.
"""
