"""What each page answers, the page itself and its theme.

It may import the rooms before it in `app`, up to `session`, and `engine`.
"""
