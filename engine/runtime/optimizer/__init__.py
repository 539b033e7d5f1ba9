"""AdamW and the coding of its moments, on the GPU and on the CPU."""
