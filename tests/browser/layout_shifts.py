"""How much a page moves what a person looks at."""

from __future__ import annotations

from playwright.sync_api import Page

MOST = 0.05
"""Sum of the shifts, as a share of the window: half of what counts as good (web.dev/cls)."""
OBSERVE = """(() => {
  window.shifts = [];
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) if (!each.hadRecentInput) window.shifts.push([
      each.value, document.querySelector('.rs-head')?.dataset.phase ?? '',
      each.sources.map(({node}) => node?.id || node?.className || node?.nodeName).join(', ')]);
  }).observe({type: 'layout-shift'});
})()"""


def observe_opening(page: Page) -> None:
    """Observes every page that is opened from here on."""
    page.add_init_script(OBSERVE)


def observe_from_here(page: Page) -> None:
    """Observes the page that is open."""
    page.evaluate(OBSERVE)


def forget(page: Page) -> None:
    page.evaluate("window.shifts = []")


def assert_still(page: Page) -> None:
    """Fails with what moved, if that is too much."""
    shifts = page.evaluate("window.shifts")
    told = "\n".join(f"{value:.4f} {phase} {nodes}" for value, phase, nodes in shifts)
    assert sum(value for value, *_ in shifts) < MOST, told
