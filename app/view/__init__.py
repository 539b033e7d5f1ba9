"""From a snapshot or a report to figures and words: pure functions, and the watch of one run that
serves every page with them.

It may import `app.words`, `app.form` and `engine`.
"""
