"""Texts are divided into words as a tokenizer divides them, and each word is tokenised once.

- `byte_level.py` divides by the patterns of a byte-level tokenizer.
- `pattern.py` reads a pattern, and `automaton.py` makes a table of it, by which a text is divided
  character by character. `runs_first.py` makes one table where a tokenizer divides several times.
- `sought_tokens.py` finds what a tokenizer looks for before it divides.
- `marked_spaces.py` makes the table for tokenizers that write spaces as `▁`.
- `word_kernels.py` divides and looks up, without the interpreter's lock.
- `word_tokens.py` keeps what is known of a tokenizer and of the words that have come up.
"""
