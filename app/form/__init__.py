"""Settings are turned into a form and read back from it here, and presets are read.

It may import `app.words` and `engine`.
"""
