"""Rows are read as examples: a conversation, a question with its answer, a text, or tokens.

Each format says by which columns it is known and how a row of it becomes an example. What a row
says is used, named as unused, or refused.
"""
