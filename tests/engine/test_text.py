"""What is said of a number is never false: something is not rounded to nothing, nor nearly all to
all.
"""

from __future__ import annotations

import pytest

from engine.text import billions, counted, in_gb, in_gib, in_hours, in_percent, in_seconds

GIB = 1 << 30


@pytest.mark.parametrize(
    "reported, words",
    [
        (in_percent(16, 73.6 * 1024), "under 1 %"),
        (in_percent(0, 5), "0 %"),
        (in_percent(17, 100), "17 %"),
        (in_percent(199, 200), "over 99 %"),
        (in_percent(200, 200), "100 %"),
        (in_percent(7, 5), "140 %"),
        (in_gib(3 * GIB), "3.0 GiB"),
        (in_gib(12 << 20), "12 MiB"),
        (in_gib(4096), "4 KiB"),
        (in_gib(300), "300 bytes"),
        (in_gib(0), "0 KiB"),
        (in_gb(1.234e9), "1.23 GB"),
        (in_gb(7_063_000), "7.1 MB"),
        (in_gb(4_000), "4 KB"),
        (in_gb(12), "12 bytes"),
        (in_gb(0), "0 KB"),
        (in_hours(0.2), "under 1 s"),
        (in_hours(45), "45 s"),
        (in_hours(0), "0 s"),
        (in_hours(164), "2 min 44 s"),
        (in_hours(7_500), "2 h 5 min"),
        (in_hours(172_800), "2 d"),
        (in_seconds(0.034), "0.034 s"),
        (in_seconds(2.413), "2.41 s"),
        (in_seconds(11.46), "11.5 s"),
        (in_seconds(99.96), "100 s"),
        (in_seconds(345.6), "346 s"),
        (in_seconds(1234.5), "20 min 34 s"),
        (counted(0, "unit"), "0 units"),
        (counted(1, "round"), "1 round"),
        (counted(1200, "micro-batch"), "1,200 micro-batches"),
        (billions(7_615_616_512), "7.62 billion"),
        (billions(860_000), "860,000"),
        (billions(1_860_000), "1.86 million"),
    ],
)
def test_a_number_in_words(reported, words):
    assert reported == words
