"""Changes that break the engine on purpose, one at a time, and the tests that notice each of them.

Tests that pass say little unless they also fail when they should. Each record here is a mistake
that an engineer could make, such as a sum that is rounded too early. The tool makes it in a copy of
the tree and runs the tests. docs/changes.md shows what was caught by which test.

No mutation testing library is used. Those swap operators and constants at random places. Most of
what they make is of no meaning here, a run over `engine` would take weeks, and the faults that
matter are none of theirs: a rounding that comes too early, a wait that is left out, a mean of
means. Ours are chosen by hand, for what they mean, and each says which tests ought to see it.
"""
