"""Answers to requests in the form of OpenAI's API: what is asked, drawn, and sent back. The web
routes are the app's.
"""
