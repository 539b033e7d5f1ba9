"""Texts are divided into words as a byte-level tokenizer divides them, and each word is tokenised
once.

- `pattern.py` reads the pattern of a tokenizer.
- `automaton.py` makes a table of it, by which a text is divided character by character.
- `word_kernels.py` divides and looks up, without the interpreter's lock.
- `word_tokens.py` keeps what is known of a tokenizer and of the words that have come up.
"""
