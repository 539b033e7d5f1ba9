"""The command line's progress bars."""

from __future__ import annotations

import io

import pytest

from engine.tools.cli.bars import SteadyBar
from tests.support.clocks import DAYS_40, Clocks


@pytest.mark.parametrize("set_by", [DAYS_40, -DAYS_40])
def test_a_clock_that_is_set_changes_neither_the_rate_nor_the_time_left(monkeypatch, set_by):
    clocks = Clocks(monkeypatch)
    screen = io.StringIO()
    bar = SteadyBar(total=20, unit="step", file=screen, mininterval=0, ncols=80)
    for step in range(10):
        clocks.pass_by(2)
        if step == 5:
            clocks.set_by(set_by)
        bar.update(1)
    assert bar.format_dict["elapsed"] == 20
    assert "10/20 [00:20<00:20,  2.00s/step]" in screen.getvalue()
    bar.close()
