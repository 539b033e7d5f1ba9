"""How fast this machine is, and how near the engine comes to it: `launch.py bench`."""
