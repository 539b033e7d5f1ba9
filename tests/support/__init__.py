"""Scripts that check the whole program from outside, beside the tests of its parts."""
