"""The look of the pages that are shown before anybody is let in. They need no other file."""

from __future__ import annotations

import html

# A backslash at the end of a line joins it to the next one.
_STYLE = """\
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --text: #1c2330; \
--line: #7b8494; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --page: #11151c; --card: #1a202a; --text: #e8ebf0; --line: #7b8698; --bad: #ff9c94 } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; \
background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
main { background: var(--card); padding: 28px 32px; border-radius: 12px; \
width: min(300px, 80vw); box-sizing: content-box }
main.wide { width: min(460px, calc(100vw - 88px)); margin: 16px 0 }
h1 { font-size: 20px; margin: 0 0 16px; display: flex; align-items: center; gap: 10px }
h2 { font-size: 17px; margin: 0 0 8px }
h1 rect { fill: #2257c9 } h1 path { stroke: #fff; stroke-width: 3; stroke-linecap: round }
label { display: block; margin: 12px 0 4px } \
p { margin: 0 0 12px } p[role=alert] { color: var(--bad) }
code { display: block; margin: 0 0 12px; padding: 9px 10px; border-radius: 8px; \
background: var(--page); font: 14px/1.5 ui-monospace, monospace; overflow-wrap: anywhere }
small { display: block; margin-top: 16px; font-size: 13px }
input { width: 100%; box-sizing: border-box; padding: 9px 10px; font: inherit; \
border: 1px solid var(--line);
  border-radius: 8px; background: var(--page); color: inherit }
button { margin-top: 20px; width: 100%; padding: 10px; font: inherit; font-weight: 600; \
border: 0; border-radius: 8px;
  background: #2257c9; color: #fff; cursor: pointer }
"""

_LOGO = """\
<svg width="28" height="28" viewBox="0 0 32 32" aria-hidden="true">\
<rect width="32" height="32" rx="8"></rect><path d="M7 10h10M7 16h14M7 22h7"></path>\
<path d="M20 10h5M24 16h1M17 22h8" opacity=".45"></path></svg>"""


def framed(title: str, problem: str, content: str, is_wide: bool = False) -> str:
    """Returns a page with this title around `content`, which is HTML. If there is a `problem`, it
    is shown first.
    """
    note = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">\
<title>{html.escape(title)} – Ramstream</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
{_STYLE}</style></head><body><main{' class="wide"' if is_wide else ""}>\
<h1>{_LOGO}Ramstream</h1>{note}
{content}</main></body></html>"""
