"""Losses of documents and of pairs of answers, and what is said of them, are in this room."""
