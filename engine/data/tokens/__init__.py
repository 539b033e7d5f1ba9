"""Examples as tokens: chat templates, loss masks, the ends of turns, the cache of tokens."""
