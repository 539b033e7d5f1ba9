"""How near the engine comes to what this machine can do: steps on random weights, the same training
with all states on the device, and the figures as tables. What the machine can do is measured in
`engine.runtime.ceilings`.

It may import the rooms before it in `engine`, up to `talk`.
"""
