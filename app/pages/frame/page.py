"""The page: the sidebar, the line over a run, and the pages, of which the browser shows one at a
time.
"""

from __future__ import annotations

import os

import gradio as gr

from app.pages.new.checker import Checker
from app.pages.new.known_models import machine_text
from app.pages.new.panels import train_panel
from app.pages.new.train_events import PageParts, TrainEvents
from app.session.session import Session
from app.shared.template import drawn
from engine.machine.read_machine import read_machine


def build_page(session: Session, checker: Checker, has_folders: bool = False) -> gr.Blocks:
    """Builds the page and returns it; has_folders is as for `train_panel`.

    Gradio provides the form. `app/pages/frame/main.js` draws the changing content, using our own
    routes.
    """
    machine = machine_text(read_machine(session.runs_dir))
    # Each component reads this variable when it is made.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with (
        gr.Blocks(title="Ramstream", analytics_enabled=False, fill_width=True) as page,
        gr.Row(elem_id="rs-frame"),
    ):
        drawn("sidebar", {"machine": machine})
        with gr.Column(elem_id="rs-main"):
            bar = drawn("run_bar", {})
            drawn("jobs", {})
            with gr.Column(elem_id="rs-page-new"):
                drawn("new_head", {})
                panel = train_panel(checker.presets.listed(), has_folders)
            for name in ("run", "runs", "chat", "hardware"):
                drawn(name)
        TrainEvents(session, checker, PageParts(panel, bar)).connect(page)
    return page
