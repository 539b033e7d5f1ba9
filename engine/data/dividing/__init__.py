"""Texts as words, divided as a tokenizer divides them, in parallel for long texts."""
