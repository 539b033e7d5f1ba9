"""Differences that are wanted: data, each with the reason for it. All others make the comparison
fail.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deliberate:
    """`path` is that of a difference, as it is printed; `*` stands for any characters."""

    path: str
    reason: str


DELIBERATE: tuple[Deliberate, ...] = (
    Deliberate(
        "mistakes/check --model only-config/err/0",
        "a long error of another program is cut at one length everywhere, and ends in three dots",
    ),
    Deliberate("page/*head", "the page's first script is main.js"),
    Deliberate(
        "page/headers of the page/link", "scripts are in folders, and are named in that order"
    ),
    Deliberate("page/file charts.js", "it is called live.js now, after the tab"),
    Deliberate("page/file live.js", "it was called charts.js"),
    Deliberate("page/file dashboard.js", "it is called main.js now"),
    Deliberate("page/file main.js", "it was called dashboard.js"),
    Deliberate(
        "page/file patience.js/content", "a constant says what it is: UNSEEN instead of FLAT"
    ),
    Deliberate("page/file dashboard.css/content", "a comment names a file that moved"),
    Deliberate("page/file preview.css/content", "a comment says what all of the file is for"),
    Deliberate("page/files that the page asks for*", "two scripts have other names"),
    Deliberate("login/GET /ramstream/dashboard.js*", "it is called main.js now"),
    Deliberate(
        "guard/GET /ramstream/*/body/error",
        "what is asked for below /ramstream is a file, also in a folder",
    ),
    Deliberate(
        "records/live of damaged*",
        "damage within a timeline is told where it is read, as in a replay, and not later",
    ),
    Deliberate("http/keys of */memory_sampled*", "host_available was recorded and never read"),
    Deliberate("run/*keys by kind/memory_sampled*", "host_available was recorded and never read"),
    Deliberate("starter/*memory_sampled*", "host_available was recorded and never read"),
    Deliberate("starter/*plan_built*grid", "the grid names slots as the text form of a plan does"),
    Deliberate(
        "run/*event plan_built */grid", "the grid names slots as the text form of a plan does"
    ),
)
