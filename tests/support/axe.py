"""axe-core in a page: rules of accessibility, and what of a page breaks them."""

from __future__ import annotations

from pathlib import Path

import axe_playwright_python

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
STANDARDS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
COLOR_RULES = ["color-contrast", "link-in-text-block"]
"""All that the other theme can change: it is colors alone, which no width changes."""
IMPACTS = {"serious", "critical"}
WIDTHS = (1300, 800, 390)
SCHEMES = ("light", "dark")
FIND = """async ([within, only]) => {
  const options = {resultTypes: ['violations'], runOnly: only};
  const {violations} = await axe.run(within === null ? document : within, options);
  return violations.flatMap((rule) => rule.nodes.map((node) => ({
    rule: rule.id, impact: node.impact ?? rule.impact, target: node.target.join(' '),
    html: node.html.slice(0, 160), why: node.failureSummary})));
}"""


def look(page, where, within=None, findings=None):
    """Every serious or critical finding at all widths, at the first in both themes; the page is
    never wider than its window.
    """
    findings = [] if findings is None else findings
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in SCHEMES if width == WIDTHS[0] else SCHEMES[:1]:
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.wait_for_function(
                "dark => document.body.classList.contains('dark') === dark", arg=scheme == "dark"
            )
            # A button that scrolled below the line over the run is not too small: it is elsewhere.
            page.evaluate("() => scrollTo(0, 0)")
            only = COLOR_RULES if scheme == "dark" else {"type": "tag", "values": STANDARDS}
            findings += [
                f"{where}, {width} px, {scheme}: {found['rule']} at {found['target']}: "
                f"{found['html']}\n{found['why']}"
                for found in page.evaluate(FIND, [within, only])
                if found["impact"] in IMPACTS
            ]
        page.wait_for_function(
            "width => document.documentElement.scrollWidth <= width", arg=width, timeout=5000
        )
    page.set_viewport_size({"width": 1300, "height": 900})
    return findings
