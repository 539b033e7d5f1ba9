"""Who may ask, and what is answered: the server, its guard, the login and the routes.

It may import the rooms before it in `app`, up to `pages`, and `engine`.
"""
