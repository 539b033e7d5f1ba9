"""A run: overview, learning, machine, timeline, settings, log and export."""
