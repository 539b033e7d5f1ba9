"""The files of a model, on the hub and on this machine, and the tensors in them."""
