"""The build of plotly.js that is sent draws all our charts, as the installed package would."""

from __future__ import annotations

import re

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.offline import get_plotlyjs_version

from app.server import plotly_js
from app.server.page_files import APP
from app.server.plotly_js import BUILD, build_version, compressed_plotly, plotly_script

TYPE = re.compile(r'"type": "(\w+)"')
IN_BUILD = re.compile(r'moduleType:"trace",name:"(\w+)"')


def traces_of_figures() -> set[str]:
    """The types of traces that the makers of figures name."""
    classes = [each for name in dir(go) if isinstance(each := getattr(go, name), type)]
    known = {each.__name__.lower() for each in classes if issubclass(each, BaseTraceType)}
    named = {name for path in APP.rglob("*.py") for name in TYPE.findall(path.read_text("utf-8"))}
    return named & known


def test_the_build_draws_every_trace_of_our_figures():
    drawn = set(IN_BUILD.findall(BUILD.read_text("utf-8")))
    assert {"scatter", "bar", "heatmap"} <= traces_of_figures() <= drawn


def test_the_build_is_of_the_installed_packages_major_version_and_a_third_of_its_size():
    assert build_version().split(".")[0] == get_plotlyjs_version().split(".")[0]
    assert BUILD.read_bytes() in plotly_script()
    assert len(compressed_plotly("br")) < len(compressed_plotly("gzip")) < 550_000
    assert (BUILD.parent / "LICENSE").read_text("utf-8").startswith("MIT License")


def test_a_package_of_another_major_version_sends_its_own_build(monkeypatch):
    monkeypatch.setattr(plotly_js, "get_plotlyjs_version", lambda: "3.7.0")
    sent = plotly_script.__wrapped__()
    assert BUILD.read_bytes() not in sent and b"scattergl" in sent
