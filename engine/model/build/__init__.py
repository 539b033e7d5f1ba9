"""A model as units that are streamed, tried out, and measured for the planner."""
