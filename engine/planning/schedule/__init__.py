"""A training step as plain data: the ops of each lane, their order and waits, checked and
simulated.
"""
