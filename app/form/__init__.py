"""This room turns settings into a form and back, and reads presets.

It may import `app.words` and `engine`.
"""
