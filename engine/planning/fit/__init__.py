"""The plan of a job, its predicted memory and time, whether it fits, and which settings would make
it fit.
"""
