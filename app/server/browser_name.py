"""A browser's name and system in words, from a closed list: a User-Agent may say anything."""

from __future__ import annotations

# Most browsers also name those whose pages they imitate, so the order matters.
_BROWSERS = (
    ("Edg/", "Edge"),
    ("OPR/", "Opera"),
    ("Firefox/", "Firefox"),
    ("Chrome/", "Chrome"),
    ("Safari/", "Safari"),
    ("curl/", "curl"),
)
_SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("Linux", "Linux"),
)
UNKNOWN = "Another program"


def browser_name(agent: str) -> str:
    """Returns the browser and the system that a User-Agent header names."""
    browser = next((name for mark, name in _BROWSERS if mark in agent), None)
    system = next((name for mark, name in _SYSTEMS if mark in agent), None)
    if browser is None:
        return UNKNOWN
    return browser if system is None else f"{browser} on {system}"
