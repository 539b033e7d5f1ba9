"""New: the form of a training, its data, and whether it fits."""
