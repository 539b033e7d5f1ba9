"""Chat: messages to the base model and to the trained one."""
