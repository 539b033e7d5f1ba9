"""A package for each page, and `frame`, which is around all of them.

A page has its answers, words and routes in Python, its scripts, its style sheets and its templates.
"""
