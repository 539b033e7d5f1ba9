"""The figures of `launch.py bench` as tables for human readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.config.optimizers import MEASURED_SIDE, OPTIMIZERS
from engine.text import GIB, billions, in_gib
from engine.tools.bench.steady import warm_up_text

Row = tuple[str, str]
"""Name and value of a row, both as text."""
LEAST_BUSY_SECONDS = 5e-5
"""A lane that is busy for less would be shown with 0.0 ms, and is left out."""


def as_text(result: dict[str, Any]) -> str:
    """Returns all tables for the result of `engine.tools.cli.bench.measured`."""
    machine = result["machine"]
    parts = [f"{machine['device']}; {machine['cpu_name']}, {machine['cpu_cores']} cores"]
    parts.append(_peak_rates(result["ceilings"]))
    for training in result["trainings"]:
        parts.append(streamed_as_text(training["streamed"]))
        parts.append(_resident(training["resident"]))
    parts += [_sampling(sampling) for sampling in result["samplings"]]
    return "\n\n".join(parts)


def _sampling(figures: dict[str, Any]) -> str:
    kept = f"{figures['blocks_on_device']} of {figures['blocks']} blocks stay on the device"
    rows = [
        ("speed", f"{figures['tokens_per_second']:,.0f} tokens/s in {figures['seconds']:.2f} s"),
        ("a step, in the middle", f"{1e3 * figures['median_step_seconds']:.2f} ms"),
        ("weights", kept),
        ("drawn", figures["way"]),
    ]
    if figures["peak_device_bytes"]:
        rows.append(("memory of the device", f"peak {in_gib(figures['peak_device_bytes'])}"))
    table = _table(f"Sampling: {figures['job']}", rows)
    return "\n".join(filter(None, (table, figures["slow_note"])))


def _table(title: str, rows: list[Row]) -> str:
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([title, *lines])


def _peak_rates(peak_rates: dict[str, Any]) -> str:
    c = peak_rates
    copies = _in_billions(c["host_copy"].values())
    adamw = _in_billions(c["adamw"].values())
    threads = " / ".join(str(count) for count in c["adamw"])
    all_others = {OPTIMIZERS[name]: rate for name, rate in c["other_optimizers"].items()}
    others = {each.format: rate for each, rate in all_others.items() if not each.orthogonalizes}
    has_gpu = c["call"] is not None
    rows = [
        ("matrix product, sustained", _tflops(c["matmul"])),
        (
            "causal attention",
            f"{_tflops(c['attention_forward'])} forward, {_tflops(c['attention_backward'])} "
            "backward",
        ),
    ]
    if has_gpu:
        rows = [
            ("to the device, alone", _gb(c["h2d"])),
            ("from the device, alone", _gb(c["d2h"])),
            ("both ways at once", f"{_gb(c['h2d_with_d2h'])} to, {_gb(c['d2h_with_h2d'])} from"),
            *rows,
        ]
        # What it takes beside its products is estimated, and may be more than that.
        if c["packed_attention"] <= c["matmul"]:
            rows.append(
                ("attention of packed rows", f"{_tflops(c['packed_attention'])} in long rows")
            )
        rows.append(("a launch beside AdamW", f"{1e6 * c['call']:,.1f} µs"))
    if c["link"] is not None:
        rows.append(("between two GPUs", f"{_gb(c['link'])} each way at once"))
    if has_gpu:
        rows.append(("memory of the device", f"{_gb(c['device_memory'])} read and written"))
    rows += [
        ("memory of the host", f"{copies} GB/s read and written, with {threads} threads"),
        ("AdamW on the host", f"{adamw} billion parameters/s, with {threads} threads"),
        (
            f"the same, moments in {' / '.join(others)}",
            f"{_in_billions(others.values())} billion parameters/s",
        ),
        *(
            (
                f"{each.label}, on the host",
                f"{rate / 1e6:,.2f} million parameters/s of a matrix of {MEASURED_SIDE} rows and "
                "columns",
            )
            for each, rate in all_others.items()
            if each.orthogonalizes
        ),
    ]
    if has_gpu:
        rows.append(
            (
                "AdamW while the bus is busy",
                f"{c['adamw_with_copies'] / 1e9:,.2f} billion parameters/s beside "
                f"{_gb(c['h2d_with_all'])} to and {_gb(c['d2h_with_all'])} from the device",
            )
        )
    rows.append(("a sweep over its planes", f"{c['sweep'] / 1e9:,.2f} billion parameters/s"))
    return _table("This machine", rows)


def streamed_as_text(streamed: dict[str, Any]) -> str:
    """Returns only the table of the streamed training."""
    s = streamed
    trained = ""
    if s["method"] != "full":
        trained = f" ({billions(s['trained_parameters'])} trained, {s['method']})"
    title = (
        f"Streamed: {billions(s['parameters'])} parameters{trained}, "
        f"{s['tokens_per_step']:,} tokens a step{_objective(s)}, mean of {s['steps']} steps"
    )
    rows = [*_speed_rows(s), *_wait_rows(s), _plan_row(s), *_memory_rows(s)]
    return _table(title, [*rows, *_evaluation_rows(s["evaluation"])])


def _objective(s: dict[str, Any]) -> str:
    return "" if s["objective"] == "sft" else f" by {s['objective'].upper()}"


def _speed_rows(s: dict[str, Any]) -> list[Row]:
    flops = s["tflops"]
    formula = "6 x parameters x tokens"
    if s["method"] != "full":
        formula = "2 x parameters passed forward, back and trained x tokens"
    rows = [
        ("step, update to update", f"{_steps_text(s)}, {s['tokens_per_second']:,.0f} tokens/s"),
        ("warm-up", warm_up_text(s)),
    ]
    predicted = s["predicted_seconds"]
    if predicted is not None:
        error = _percent(predicted / s["seconds"] - 1, "+")
        rows.append(("predicted", f"{_seconds(predicted)} ({error})"))
    rows.append(
        (
            "TFLOPS",
            f"{flops['parameters']:,.4g} ({formula}), {flops['model']:,.4g} (causal model FLOPs)",
        )
    )
    done = f"{flops['hardware']:,.4g} TFLOPS with recompute"
    if s["utilization"] is not None:
        done += f", {_percent(s['utilization'])} of its matrix products"
    rows.append(("work done by the device", done))
    rows += [("not shown", text) for text in s["doubtful"]]
    if s["reference_seconds"] is not None:
        found = f"found in {_seconds(s['reference_seconds'])}, once before the first step"
        rows.append(("reference of the answers", found))
    return rows


def _steps_text(figures: dict[str, Any]) -> str:
    """Returns the mean of the steps that count, and their spread, as text."""
    text = _seconds(figures["seconds"])
    if figures["steps"] == 1:
        return text
    least, most = _seconds(figures["least_seconds"]), _seconds(figures["most_seconds"])
    return f"{text} ({least} to {most} in {figures['steps']} steps)"


def _wait_rows(s: dict[str, Any]) -> list[Row]:
    exposed = [f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in s["exposed"].items()]
    busy = [
        f"{lane} {_seconds(seconds)}"
        for lane, seconds in s["busy"].items()
        if seconds >= LEAST_BUSY_SECONDS
    ]
    share = s["exposed_share"]
    of_step = "" if share is None else f"{_percent(share)} of the step: "
    rows = [
        ("bound by", s["bound"]),
        ("exposed", f"{of_step}{', '.join(exposed)}"),
        ("busy", ", ".join(busy)),
        *_adamw_rows(s),
    ]
    if s["launch_seconds"] is not None:
        took = f"launches a step's work in {_seconds(s['launch_seconds'])} of processor time"
        rows.append(("Python", took))
    return rows


def _adamw_rows(s: dict[str, Any]) -> list[Row]:
    """Returns a row for each place where AdamW ran."""
    updated = s["updated_parameters"]
    total = sum(updated.values())
    of_what = "a sweep in place"
    if s["optimizer"] != "adamw":
        of_what = f"what {s['optimizer']} reaches alone"
    rates = {
        "host": (s["adamw_parameters_per_second"], s["adamw_of_alone"], of_what),
        "device": (
            s["device_adamw_parameters_per_second"],
            s["device_adamw_of_memory"],
            "the bandwidth of its memory",
        ),
    }
    rows = []
    for where, (rate, share, of_what) in rates.items():
        if not updated[where]:
            continue
        text = f"{_percent(updated[where] / total)} of the parameters"
        if rate is not None:
            text += f", {rate / 1e9:,.2f} billion parameters/s"
        if share is not None:
            text += f", {_percent(share)} of {of_what}"
        rows.append((f"AdamW on the {where}", text))
    return rows


def _plan_row(s: dict[str, Any]) -> Row:
    choices = s["choices"]
    ranks = f"{choices['ranks']} GPUs, each " if choices["ranks"] > 1 else ""
    block_inputs = "on the host" if choices["offloaded_block_inputs"] else "on the device"
    if choices.get("attention_blocks"):
        block_inputs += f" with the attention of {choices['attention_blocks']}"
    if choices["gradients_on_gpu"]:
        block_inputs += ", gradients kept on the device"
    if choices["moments_after_weights"]:
        block_inputs += ", moments updated after all weights"
    return (
        "plan",
        f"{ranks}{choices['micro_batches']} x {choices['micro_batch_size']} rows, rounds "
        f"{choices['rounds']}, {choices['gpu_resident_units']} units live on the device, "
        f"{choices['blocks_kept_in_slots']} blocks kept in slots, "
        f"{choices['blocks_without_recompute']} keep activations, block inputs {block_inputs}",
    )


def _memory_rows(s: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    if s["peak_device_bytes"]:
        rows.append(
            (
                "memory of the device",
                f"peak {s['peak_device_bytes'] / GIB:,.2f} GiB allocated, planned "
                f"{s['planned_device_bytes'] / GIB:,.2f}",
            )
        )
    peak, predicted = s["host_peak_bytes"], s["predicted_host_bytes"]
    block_inputs = s["offloaded_input_bytes"]
    rows.append(
        (
            "memory of the host",
            f"{_gib(s['host_rss_bytes'])} without block inputs, "
            f"{s['host_rss_bytes'] / s['parameters']:,.2f} bytes a parameter, "
            f"{_gib(s['host_file_bytes'])} of files of libraries among them",
        )
    )
    with_block_inputs = f" with {_gib(block_inputs)} of block inputs" if block_inputs else ""
    rows.append(
        (
            "its peak",
            f"{_gib(peak)}{with_block_inputs}, predicted {_gib(predicted)} "
            f"({_percent(predicted / peak - 1, '+')})",
        )
    )
    return rows


def _evaluation_rows(e: dict[str, Any] | None) -> list[Row]:
    if e is None:
        return []
    return [
        (
            "evaluation",
            f"{_seconds(e['seconds'])} for {e['rows']} rows in {e['micro_batches']} micro-batches",
        ),
        (
            "its kernels alone",
            f"{_seconds(e['floor_seconds'])}, so it takes {max(1.0, e['of_floor']):,.3f} times its "
            "floor",
        ),
        (
            "fetches",
            f"{e['fetches']}, {e['fetches'] / e['units']:,.2f} for each of {e['units']} units",
        ),
        (
            "one micro-batch at a time",
            f"{_seconds(e['apart_seconds'])} and {e['apart_fetches']} fetches, "
            f"{1 / e['of_apart']:,.1f} times as long",
        ),
        ("memory of the host after it", f"{e['host_rss_bytes'] / GIB:,.2f} GiB"),
    ]


def _resident(resident: dict[str, Any]) -> str:
    title = "The same with all states on the device (plain transformers, fused AdamW)"
    missing = ("not measured", resident["why_not"])
    if not resident["ways"]:
        return _table(title, [missing])
    rows = [_way_row(way) for way in resident["ways"]]
    rows.append(("streamed against the better", f"{resident['ratio']:,.3f} x its speed"))
    if resident["why_not"]:
        rows.append(missing)
    return _table(title, rows)


def _way_row(way: dict[str, Any]) -> Row:
    value = (
        f"{_steps_text(way)}, {way['tflops']['parameters']:,.4g} TFLOPS, micro-batches "
        f"of {way['micro_batch_size']} rows"
    )
    if not way["is_steady"]:
        value += ", no two steps in a row alike"
    if way["peak"]:
        value += f", peak {way['peak'] / GIB:,.2f} GiB"
    return f"{'with' if way['recompute'] else 'without'} recompute", value


def _in_billions(values: Iterable[float]) -> str:
    return " / ".join(f"{value / 1e9:,.2f}" for value in values)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s"


def _tflops(rate: float) -> str:
    return f"{rate / 1e12:,.4g} TFLOPS"


def _gib(count: float) -> str:
    """Returns a size with two digits behind the point, where these carry information."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else in_gib(count)


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f} %"
