"""Decides who is logged in: passwords, sessions, cookies, and where a request comes from.

It may import `engine`, and none of the rooms of `app`.
"""
