"""The session owns the server's state: the run, the queue, detached runs, and jobs.

It may import the rooms before it in `app`, up to `view`, and `engine`.
"""
