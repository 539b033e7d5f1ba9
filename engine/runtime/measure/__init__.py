"""How fast this machine does what a step does."""
