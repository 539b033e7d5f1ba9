"""Snapshots and reports are turned into figures and words here, by pure functions; the watch of one
run serves every page with them.

It may import `app.words`, `app.form` and `engine`.
"""
