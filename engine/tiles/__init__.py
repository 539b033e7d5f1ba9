"""Parts of a block that compute each token by itself run in tiles along a row. Attention runs once."""
