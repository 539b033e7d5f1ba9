"""Serving a run to clients of OpenAI's API: their routes, and the card that starts it."""
