"""Settings as a form, and presets.

It may import `app.words` and `engine`.
"""
