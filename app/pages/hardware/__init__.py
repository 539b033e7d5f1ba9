"""Hardware: this machine, its measurement, and which models it and others can train."""
