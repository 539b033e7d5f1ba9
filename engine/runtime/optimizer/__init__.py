"""AdamW and the coding of its moments: kernels for the GPU and for the CPU.

`engine/runtime/host/host_adamw.py` calls those for the CPU.
"""
