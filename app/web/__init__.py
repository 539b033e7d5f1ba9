"""Decides who may ask, and answers: the server with its guard, its login and its routes.

It may import the rooms before it in `app`, up to `pages`, and `engine`.
"""
