"""Tokens as micro-batches: packing, order, previews, an order that a resumed run continues."""
