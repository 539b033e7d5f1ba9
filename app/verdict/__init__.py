"""The verdict over a run: does it learn, will its memory last, and what does its time go to?

Every function is a pure one of the run's record. `docs/verdict.md` has the rules with their
sources.
"""
