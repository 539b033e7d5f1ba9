"""A Hugging Face model made streamable."""
