"""A trained model as a Hugging Face folder, with its card, and as files for other programs."""
