"""A run as its record: its events, its line in a list, its curves for trackers. No torch."""
