"""Process groups, and the exchange of weights and gradients between ranks."""
