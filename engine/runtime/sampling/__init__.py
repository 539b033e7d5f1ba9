"""Answers, drawn token by token from streamed weights."""
