"""Decides who may ask, and answers: the server with its guard and its routes.

It may import the rooms before it in `app`, up to `login`, and `engine`.
"""
