"""Tasks of lm-evaluation-harness are asked of a run's weights, which the streaming engine runs.

The package `lm_eval` is optional. Only `streamed_lm.py` and `harness.py` use it.
"""
