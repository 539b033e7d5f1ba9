"""The curves of a run also go to TensorBoard, Trackio, Weights & Biases or MLflow.

A process of its own follows the record of the run and feeds them, so none of them can stop or slow
a step.
"""
