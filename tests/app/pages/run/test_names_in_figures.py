"""Names are escaped in figures, since Plotly interprets `<b>`, `<a href>` and a few more tags, and
expands `%{...}` in templates.
"""

from __future__ import annotations

import pytest

from app.pages.run.rank_figure import timeline_part
from app.pages.run.run_figures import FIGURES
from app.pages.runs.comparison import Compared, comparison
from app.shared.charts.axes import AXES
from engine.runs.record.events import PlanSimulated, StepTimeline
from tests.support.folded import fold
from tests.support.hostile import HOSTILE, hostile_events
from tests.support.synthetic_run import records


@pytest.fixture(scope="module")
def events():
    return hostile_events()


@pytest.fixture(scope="module")
def snapshot(events):
    return fold(records(events))


def drawn(value, key=""):
    """Yields every text that Plotly could draw."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from drawn(inner, name)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from drawn(inner, key)
    elif isinstance(value, str):
        yield key, value


def check(figure):
    """Checks that the only markup is our own line breaks and the empty second box of a hover
    label.
    """
    for key, text in drawn({"data": figure["data"], "layout": figure["layout"]}):
        plain = text.replace("<br>", "").replace("<extra></extra>", "")
        assert "<" not in plain and ">" not in plain, (key, text)
        assert not (key.endswith("template") and "hacked" in text), (
            "a name in a template would be filled in"
        )


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_a_run_draw_names_as_text(snapshot, name, axis):
    check(FIGURES[name](snapshot, axis))


def test_a_timeline_draws_names_as_text(events):
    step = next(event for event in events if isinstance(event, StepTimeline))
    for simulated in (None, PlanSimulated(1.0, step.spans)):
        figure = timeline_part(step, simulated)
        check(figure)
        assert any("&lt;img" in text for _, text in drawn(figure["data"])), (
            "the unit's name is shown"
        )


@pytest.mark.parametrize("axis", ["step", "time"])
def test_compared_runs_are_drawn_with_their_names_as_text(snapshot, axis):
    runs = [
        Compared(
            f"run-{number}",
            f"{number} {HOSTILE}",
            "finished",
            snapshot,
            {"name": HOSTILE, "model.source": HOSTILE},
        )
        for number in range(2)
    ]
    for figure in comparison(runs, axis)["figures"].values():
        check(figure)
