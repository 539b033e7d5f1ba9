"""Damage to the record of a run."""

from __future__ import annotations

import json

from tests.support.synthetic_run import step_finished

STEPS = 60
DAMAGE = {
    "garbage": bytes(range(256)).replace(b"\n", b""),
    "nul bytes": bytes(4096),
    "half a line": b'{"kind":"step_finished","run_',
    "not utf-8": b'{"kind":"log_line","run_id":"r","seq":1,"time":1.0,"text":"\xff\xfe"}',
    "nested": b"[" * 100_000,
    "a long line": b"x" * (50 << 20),
    "no numbers": b'{"kind":"step_finished","run_id":"r","seq":9,"time":NaN,"step":3}',
    "empty": b"",
    "a list": b"[1, 2]",
    "a backward step": None,
    "a far step": None,
}


def line_of(step, seq=500):
    values = {"kind": "step_finished", "run_id": "written", "seq": seq, "time": 1_760_000_100.0}
    return json.dumps(
        values | step_finished(max(1, step), STEPS).fields() | {"step": step}
    ).encode()
