"""What computes: it runs the plan of a step on devices and in host memory."""
