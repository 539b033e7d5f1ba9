"""Pure functions, from a snapshot or a report to figures and words.

It may import `app.words`, `app.form` and `engine`.
"""
