"""Rows as conversations, pairs and texts: their formats, columns, roles and flags."""
