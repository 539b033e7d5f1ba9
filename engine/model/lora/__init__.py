"""Adapters in the linear layers of blocks, and PEFT's folders of adapters."""
