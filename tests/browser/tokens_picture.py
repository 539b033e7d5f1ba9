"""The picture of docs/performance.md: `python -m tests.browser.tokens_picture` draws the tokens a
second by the tokens of a step, light and dark, from the table between <!-- tokens --> marks there.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright

from app.shared.charts.drawing import BLUE, GREEN, ORANGE
from tests.support.browser import FLAGS, ROOT, chromium_path

DOCUMENT = ROOT / "docs" / "performance.md"
COLORS = {"0.5B": GREEN, "3.1B": ORANGE, "7.6B": BLUE}
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"mode": "lines+markers", "marker": {"size": 9}},
    "in memory": {"mode": "markers", "marker": {"size": 12, "symbol": "circle-open"}},
    "predicted": {"mode": "lines", "line": {"dash": "dot"}},
}
"""The columns of seconds, and how each is drawn."""
THEMES = {"light": ("plotly_white", "#ffffff"), "dark": ("plotly_dark", "#14171c")}
WIDTH, HEIGHT = 1000, 460


def rows() -> list[dict[str, str]]:
    """Returns the rows of the table, by the names of its columns."""
    text = DOCUMENT.read_text(encoding="utf-8")
    lines = text.partition("<!-- tokens -->\n")[2].partition("<!-- /tokens -->")[0].splitlines()
    names, _, *cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in cells]


def figure(theme: str) -> go.Figure:
    """Returns the figure: a line for each model and way."""
    template, background = THEMES[theme]
    drawn = go.Figure()
    for model, color in COLORS.items():
        for way, style in WAYS.items():
            of_model = [row for row in rows() if row["model"] == model and row[way]]
            tokens = [int(row["tokens a step"].replace(",", "")) for row in of_model]
            rates = [count / float(row[way]) for count, row in zip(tokens, of_model, strict=True)]
            drawn.add_scatter(x=tokens, y=rates, name=f"{model}, {way}", **style)
            drawn.data[-1].update(line_color=color, marker_color=color)
    drawn.update_layout(
        template=template,
        paper_bgcolor=background,
        plot_bgcolor=background,
        margin={"l": 70, "r": 20, "t": 20, "b": 60},
        font={"size": 14},
    )
    ticks = sorted({int(row["tokens a step"].replace(",", "")) for row in rows()})
    shown = [count for count in ticks if count != 98_304]
    named = [f"{count:,}" for count in shown]
    drawn.update_xaxes(type="log", title="tokens per step", tickvals=shown, ticktext=named)
    levels = [5_000, 10_000, 20_000, 50_000, 100_000]
    texts = [f"{count:,}" for count in levels]
    drawn.update_yaxes(type="log", title="tokens per second", tickvals=levels, ticktext=texts)
    return drawn


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        for theme in THEMES:
            html = figure(theme).to_html(default_width=f"{WIDTH}px", default_height=f"{HEIGHT}px")
            page.set_content(f"<style>body {{ margin: 0; overflow: hidden }}</style>{html}")
            page.wait_for_selector(".legend .traces")
            page.screenshot(path=DOCUMENT.with_name(f"tokens-{theme}.png"))
        browser.close()


if __name__ == "__main__":
    main()
