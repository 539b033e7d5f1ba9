"""The ops of a step as they run, its losses, and the engine that runs a plan."""
