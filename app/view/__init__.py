"""Snapshots and reports are turned into figures and words here, by pure functions. `app.watch`
serves the pages with them.

It may import `app.words`, `app.form` and `engine`.
"""
