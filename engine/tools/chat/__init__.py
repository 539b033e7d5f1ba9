"""Conversations with the weights of a run."""
