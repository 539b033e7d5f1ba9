"""How near the engine comes to what this machine can do."""
