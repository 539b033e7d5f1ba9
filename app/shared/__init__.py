"""What several pages show: the line over a run, rows of runs, nodes, base styles."""
