"""These files know models on the Hugging Face hub: their files, what is here, and downloads."""
