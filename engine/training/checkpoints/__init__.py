"""Checkpoints: written beside the training, verified, restored."""
