"""The figures of `launch.py bench` as tables for people."""

from __future__ import annotations

from typing import Any

from engine.words import GIB


def as_text(result: dict[str, Any]) -> str:
    """result: what `engine.cli.bench.measured` gives."""
    machine, parts = result["machine"], [_ceilings(result["ceilings"])]
    for training in result["trainings"]:
        parts += [
            streamed_as_text(training["streamed"]),
            _resident(training["resident"], training["streamed"]),
        ]
    head = f"{machine['device']}; {machine['cpu_name']}, {machine['cpu_cores']} cores"
    return "\n\n".join([head, *parts])


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _ceilings(c: dict[str, Any]) -> str:
    copies, adamw = (
        " / ".join(f"{value / 1e9:,.2f}" for value in c[name].values())
        for name in ("host_copy", "adamw")
    )
    threads = " / ".join(str(n) for n in c["adamw"])
    return _table(
        "This machine",
        [
            ("to the device, alone", _gb(c["h2d"])),
            ("from the device, alone", _gb(c["d2h"])),
            ("both ways at once", f"{_gb(c['h2d_with_d2h'])} to, {_gb(c['d2h_with_h2d'])} from"),
            ("matrix product, sustained", _tflops(c["matmul"])),
            (
                "causal attention",
                f"{_tflops(c['attention_forward'])} forward, {_tflops(c['attention_backward'])} "
                "backward",
            ),
            *(
                [
                    ("attention of packed rows", f"{_tflops(c['packed_attention'])} in long rows"),
                    ("a launch beside AdamW", f"{1e6 * c['call']:,.1f} µs"),
                ]
                if c.get("call")
                else []
            ),
            ("memory of the device", f"{_gb(c['device_memory'])} read and written"),
            ("memory of the host", f"{copies} GB/s read and written, with {threads} threads"),
            ("AdamW on the host", f"{adamw} billion parameters/s, with {threads} threads"),
            (
                "AdamW while the bus is busy",
                f"{c['adamw_with_copies'] / 1e9:,.2f} billion parameters/s beside "
                f"{_gb(c['h2d_with_all'])} to and {_gb(c['d2h_with_all'])} from the device",
            ),
            ("a sweep over its planes", f"{c['sweep'] / 1e9:,.2f} billion parameters/s"),
        ],
    )


def streamed_as_text(s: dict[str, Any]) -> str:
    """The table of the streamed training alone."""
    c, flops = s["choices"], s["tflops"]
    exposed = ", ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in s["exposed"].items())
    busy = ", ".join(f"{lane} {_seconds(seconds)}" for lane, seconds in s["busy"].items())
    kept, boundaries = c["kept_blocks"], "on the host" if c["host_boundaries"] else "on the device"
    return _table(
        f"Streamed: {s['parameters'] / 1e9:,.3f} billion parameters, {s['tokens_per_step']:,} "
        f"tokens a step, mean of {s['steps']} steps",
        [
            (
                "step, home to home",
                f"{_seconds(s['seconds'])}, {s['tokens_per_second']:,.0f} tokens/s",
            ),
            (
                "predicted",
                f"{_seconds(s['predicted_seconds'])} "
                f"({_percent(s['predicted_seconds'] / s['seconds'] - 1, '+')})",
            ),
            (
                "TFLOPS",
                f"{flops['parameters']:,.4g} (6 x parameters x tokens), {flops['model']:,.4g} "
                "(causal model FLOPs)",
            ),
            (
                "work done by the device",
                f"{flops['hardware']:,.4g} TFLOPS with recompute, {_percent(s['utilisation'])} of "
                "its matrix products",
            ),
            ("bound by", s["bound"]),
            ("exposed", f"{_percent(s['exposed_share'])} of the step: {exposed}"),
            ("busy", busy),
            (
                "AdamW in the step",
                f"{s['adamw_parameters_per_second'] / 1e9:,.2f} billion parameters/s, "
                f"{_percent(s['adamw_of_sweep'])} of a sweep in place",
            ),
            (
                "Python",
                f"launches a step's work in {_seconds(s['launch_seconds'])} of processor time",
            ),
            (
                "plan",
                f"{c['micro_batches']} x {c['micro_batch_size']} rows, rounds {c['rounds']}, "
                f"{c['resident_blocks']} blocks resident, {kept} keep activations, boundaries "
                f"{boundaries}",
            ),
            *(
                [
                    (
                        "memory of the device",
                        f"peak {s['peak_device_bytes'] / GIB:,.2f} GiB allocated, planned "
                        f"{s['planned_device_bytes'] / GIB:,.2f}",
                    )
                ]
                if s["peak_device_bytes"]
                else []
            ),
            (
                "memory of the host",
                f"{s['host_rss_bytes'] / GIB:,.2f} GiB, "
                f"{s['host_rss_bytes'] / s['parameters']:,.2f} bytes a parameter, "
                f"{s['host_boundaries_bytes'] / GIB:,.2f} GiB of boundaries among them",
            ),
        ],
    )


def _resident(r: dict[str, Any], streamed: dict[str, Any]) -> str:
    title = "The same with all states on the device (plain transformers, fused AdamW)"
    if not r["ways"]:
        return _table(title, [("not measured", r["why_not"])])
    rows = [
        (
            f"{'with' if way['recompute'] else 'without'} recompute",
            f"{_seconds(way['seconds'])}, {way['tflops']['parameters']:,.4g} TFLOPS, micro-batches "
            f"of {way['micro_batch_size']} rows"
            + (f", peak {way['peak'] / GIB:,.2f} GiB" if way["peak"] else ""),
        )
        for way in r["ways"]
    ]
    rows.append(("streamed against the better", f"{r['ratio']:,.3f} x its speed"))
    return _table(title, rows + ([("not measured", r["why_not"])] if r["why_not"] else []))


def _gb(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s"


def _tflops(rate: float) -> str:
    return f"{rate / 1e12:,.4g} TFLOPS"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f} %"
