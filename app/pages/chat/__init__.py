"""Chat: messages to the model before training and to the tuned one."""
