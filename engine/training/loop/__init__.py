"""One run, from its folder to the last line of its record."""
