"""Parts of a block that compute each token by itself run in tiles, and its attention runs once."""
