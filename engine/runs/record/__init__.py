"""A run's folder, the events in it, their only writer, and the snapshot that readers build."""
