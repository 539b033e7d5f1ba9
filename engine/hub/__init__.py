"""Models on the Hugging Face hub: which files they have, what is here already, and downloads."""
