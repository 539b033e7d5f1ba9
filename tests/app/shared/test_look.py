"""Every text of the page has one of the few sizes of the scale, in `app/shared/base.css`."""

from __future__ import annotations

import re

from app.server.page_files import APP, page_files

SIZE = re.compile(r"font-size: ([^;]+);")
SCALE = re.compile(r"--rs-size-\w+: [\d.]+px;")
NONE = ("inherit", "0")
"""`0` is that of a text whose place another one takes."""


def test_every_text_has_a_size_of_the_scale():
    styles = {name: (APP / name).read_text() for name in page_files() if name.endswith(".css")}
    assert len(SCALE.findall(styles["shared/base.css"])) == 6
    other = [
        f"{name}: {size}"
        for name, text in styles.items()
        for size in SIZE.findall(text)
        if size.removesuffix(" !important") not in NONE
        and not re.fullmatch(r"var\(--rs-size-\w+\)( !important)?", size)
    ]
    assert not other
