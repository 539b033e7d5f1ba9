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
        "mistakes/*--port 99999*",
        "a port that cannot be is refused in a sentence; it ended in a traceback",
    ),
    Deliberate(
        "page/*props/info", "the help texts of settings, which are docstrings, are sentences"
    ),
    Deliberate("page/*props/html_template", "lines of the templates are broken at 100 characters"),
    Deliberate(
        "page/file *.js/content", "Biome formats the scripts; their jobs are in smaller functions"
    ),
    Deliberate("page/file *.css/content", "Biome formats the styles"),
    Deliberate("page/file model_table.js", "the table of the Hardware tab has a script of its own"),
    Deliberate("page/file offers.js", "the machines for a model have a script of their own"),
    Deliberate("page/*head", "the page names two more scripts"),
    Deliberate("page/headers of the page/link", "the page names two more scripts"),
    Deliberate("page/files that the page asks for*", "the page names two more scripts"),
    Deliberate("login/GET /login?link_used=1/body", "a used link is told in plainer words"),
    Deliberate("login/form of the cookie", "the name of the cookie has the port in it"),
    Deliberate("login/a cookie twice*", "of two cookies with our name, any valid one counts"),
    Deliberate("login/the right password after too many*", "nobody is locked out at the machine"),
    Deliberate("login/the cookie after a restart", "a session belongs to the port of its server"),
    *(
        Deliberate(f"login/{asked}*/body", "the login page shows the logo")
        for asked in ("GET /login", "a wrong", "no password", "guess")
    ),
    Deliberate(
        "records/*<order of keys>",
        "a figure's keys come in another order, which JSON does not have",
    ),
)
