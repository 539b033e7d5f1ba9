"""Progress: work that says what it does, and work that does not, tell it to the same callable."""

from __future__ import annotations

from engine.progress import Progress, labeled, no_progress


def test_work_that_says_nothing_is_told_under_a_name():
    found = []

    def note(done: float, total: float, message: str = "") -> None:
        found.append((done, total, message))

    progress: Progress = labeled(note, "Reading")
    progress(1, 2)
    progress(2, 2, "unheard")
    assert found == [(1, 2, "Reading"), (2, 2, "Reading")]
    assert no_progress(1, 2) is None and no_progress(1, 2, "heard by nobody") is None
