"""plotly.js, which draws the charts in the browser.

`assets/plotly` has its cartesian build, npm's plotly.js-cartesian-dist-min. It draws all traces of
our figures, and is a third of the whole that the Python package has.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import re

import brotli
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from engine.paths import PROGRAM_ROOT

BUILD = PROGRAM_ROOT / "assets" / "plotly" / "plotly-cartesian.min.js"
_VERSION = re.compile(rb"plotly\.js \(cartesian - minified\) v([\d.]+)")
_HINT = b"//# allFunctionsCalledOnLoad\n"
"""Chromium's explicit compile hint. Nearly all functions of plotly.js are called as it loads, so
the browser compiles them on another thread while the file arrives. The page is then blocked for
only a seventh of the time.
"""


def build_version() -> str:
    """Returns the version of plotly.js in `BUILD`."""
    found = _VERSION.search(BUILD.read_bytes())
    assert found is not None
    return found[1].decode()


@functools.cache
def plotly_script() -> bytes:
    """Returns the script that a page loads.

    Figures are written for the installed package. If its plotly.js has another major number, the
    package's own is sent.
    """
    is_same = _major(build_version()) == _major(get_plotlyjs_version())
    return _HINT + (BUILD.read_bytes() if is_same else get_plotlyjs().encode())


def _major(version: str) -> str:
    return version.partition(".")[0]


@functools.cache
def compressed_plotly(coding: str) -> bytes:
    """Returns the script in a content coding: `br`, which is a tenth smaller, or `gzip`."""
    if coding == "br":
        return brotli.compress(plotly_script(), quality=9)
    return gzip.compress(plotly_script(), 6)


@functools.cache
def plotly_address() -> str:
    """Returns the address of the script, which is different for each version."""
    return f"/ramstream/plotly-{hashlib.sha256(plotly_script()).hexdigest()[:12]}.js"
