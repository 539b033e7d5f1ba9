"""Where each parameter, gradient and moment is in the planes of a unit, and their bytes."""
