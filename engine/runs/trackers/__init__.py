"""The curves of a run for TensorBoard, Weights & Biases and others, read from its record."""
