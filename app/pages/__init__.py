"""The modules here prepare each page's answers; the page itself and its theme are here too.

They may import the rooms before them in `app`, up to `session`, and `engine`.
"""
