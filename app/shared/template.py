"""Places of the page that our own scripts draw into.

They draw all changing content into constant templates. Data never pass through a template, so that
no name or text can become markup.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gradio as gr

APP = Path(__file__).parent.parent


@functools.cache
def _templates() -> dict[str, Path]:
    """Returns the templates of all pages by name."""
    return {path.stem: path for path in APP.rglob("*.html")}


def drawn(name: str, value: Any = None) -> gr.HTML:
    """Adds a place for `main.js` to draw into, and returns it.

    It is the template `<name>.html` of a page, with `value` as its data.
    """
    template = _templates()[name].read_text(encoding="utf-8")
    mount = (
        f"(window.ramstreamPlaces ??= []).push({{name: '{name}', element, props, trigger, watch}})"
    )
    return gr.HTML(
        value,
        html_template=template,
        js_on_load=mount,
        apply_default_css=False,
        elem_id=f"rs-{name}",
    )
