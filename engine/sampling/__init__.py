"""Sampling: answers are drawn token by token through the streaming engine.

It may import the rooms before it in `engine`, up to `runtime`.
"""
