"""Machines, their rates and what they can train, as texts for Hardware. All functions are pure."""

from __future__ import annotations

from typing import Any

from app.labels import GIB, in_bytes
from engine.config.optimizers import ADAMW, OPTIMIZERS
from engine.machine.gpus import GpuInfo
from engine.machine.known_machines import KnownMachine
from engine.machine.rates import Rates
from engine.machine.read_machine import Machine
from engine.planning.fit.model_table import KEPT_ON_GPU, PAIRS, Cell, speed_text
from engine.planning.fit.requirements import FitStatus
from engine.text import counted, in_seconds

STATUS_LABELS = {
    FitStatus.FITS: ("good", "fits"),
    FitStatus.TIGHT: ("warn", "just fits"),
    FitStatus.DOES_NOT_FIT: ("bad", "too large"),
}
WAY_SENTENCES = {
    KEPT_ON_GPU: "Gradients wait on the GPU until they are applied.",
    PAIRS: "Only every second block keeps its input.",
}
FIGURE_NAMES = {
    "memory_mib": "Memory",
    "memory_bandwidth": "Its bandwidth",
    "bf16_flops": "bf16 matrix products, peak",
    "best_bf16_flops": "Best that others measured",
    "link": "Link to RAM",
    "host_bandwidth": "Bandwidth of RAM",
    "ram_gib": "RAM",
    "cpu_cores": "CPU cores",
    "power_watts": "Power",
}
MEASURED = "The time of a run is predicted from these."
UNKNOWN = "Not known for this GPU yet. The first run measures them, or press Measure."
UNKNOWN_ON_CPU = "Not measured yet, so the time of a run is unknown."


def machine_facts(machine: Machine, busy: bool) -> dict[str, Any]:
    """Returns `pairs` of a name and a text, and `notes`, which are sentences."""
    pairs = [
        ["Processor", f"{machine.cpu_name}, {counted(machine.cpu_cores, 'core')} usable"],
        ["RAM", _free_of(machine.ram_available, machine.ram_limit)],
    ]
    for gpu in machine.gpus:
        name = f"GPU {gpu.index}" if len(machine.gpus) > 1 else "GPU"
        pairs.append([name, _gpu_text(gpu)])
    if not machine.gpus:
        pairs.append(["GPU", "none"])
    pairs.append(["Disk", f"{in_bytes(machine.disk_free)} free in {machine.disk_path}"])
    notes = [*machine.notes, *(found.sentence for found in machine.findings)]
    if len(machine.gpus) > 1:
        notes.append(
            f"A run uses the first GPU, the {machine.gpus[0].name}, unless it is set to use more."
        )
    if busy:
        notes.append("A run is training: the memory that it uses does not count as free.")
    return {"pairs": pairs, "notes": notes}


def _free_of(free: int, total: int) -> str:
    """Returns how much of a memory is free, as in 17.6 of 23.5 GiB free."""
    left, whole = in_bytes(free), in_bytes(total)
    return f"{left.removesuffix(whole[-4:])} of {whole} free"


def _gpu_text(gpu: GpuInfo) -> str:
    parts = [f"{gpu.name}, {_free_of(gpu.free, gpu.total)}"]
    if gpu.driver:
        parts.append(f"driver {gpu.driver}")
    now = _bus(gpu.pcie_generation, gpu.pcie_width)
    most = _bus(gpu.pcie_generation_max, gpu.pcie_width_max)
    if now or most:
        parts.append(f"{now or most} now, {most or now} at most")
    return "; ".join(parts)


def _bus(generation: int | None, width: int | None) -> str:
    return f"PCIe {generation}.0 x{width}" if generation and width else ""


def rates_text(
    machine: Machine,
    measured: Rates | None,
    measured_at: float | None,
    estimated: Rates | None,
    known: KnownMachine | None,
) -> dict[str, Any]:
    """Returns the rates that plans use, measured ones if available. `origin` is measured, estimated
    or unknown; `at` is the Unix time of the last measurement. The `estimated` rates follow from the
    specification of the `known` machine.
    """
    has_gpu = bool(machine.gpus)
    if measured is not None:
        return {
            "origin": "measured",
            "caption": MEASURED,
            "at": measured_at,
            "pairs": _rate_pairs(measured, has_gpu),
        }
    if estimated is not None and known is not None:
        return {
            "origin": "estimated",
            "caption": f"Estimated from the specification of the {known.name}, until they are "
            "measured.",
            "at": None,
            "pairs": _rate_pairs(estimated, True),
        }
    return {
        "origin": "unknown",
        "caption": UNKNOWN if has_gpu else UNKNOWN_ON_CPU,
        "at": None,
        "pairs": [],
    }


def _rate_pairs(rates: Rates, has_gpu: bool) -> list[list[str]]:
    """Returns pairs of a name and a rate. Rates are in units per second: bytes, operations or
    parameters.
    """
    host = OPTIMIZERS[ADAMW].update_bytes * rates.adamw
    update = [
        "AdamW on the CPU, moments in fp32",
        f"{rates.adamw / 1e9:,.3g} billion parameters/s ({host / 1e9:,.3g} GB/s of RAM)",
    ]
    if not has_gpu:
        memory = f"{rates.device_memory / 1e9:,.3g} GB/s, read and written"
        return [
            ["Matrix products", f"{rates.matmul / 1e9:,.3g} GFLOPS in fp32"],
            ["Norms, activations, gradients", memory],
            update,
        ]
    bus = f"{rates.h2d / 1e9:,.3g} GB/s to the GPU, {rates.d2h / 1e9:,.3g} GB/s back"
    return [
        ["Bus, both ways at once", bus],
        ["Matrix products", f"{rates.matmul / 1e12:,.3g} TFLOPS in bf16"],
        ["GPU memory", f"{rates.device_memory / 1e9:,.4g} GB/s"],
        update,
        ["AdamW beside a busy bus", f"{rates.adamw_busy / 1e9:,.3g} billion parameters/s"],
    ]


def known_machine_text(known: KnownMachine) -> dict[str, Any]:
    """Returns a known machine with its figures, each with its sources."""
    values = {
        "memory_mib": gpu_memory_text(known),
        "memory_bandwidth": f"{known.memory_bandwidth / 1e9:,.4g} GB/s",
        "bf16_flops": f"{known.bf16_flops / 1e12:,.4g} TFLOPS",
        "link": f"{known.link}, {known.link_bandwidth / 1e9:,.3g} GB/s one way",
        "host_bandwidth": f"{known.host_bandwidth / 1e9:,.3g} GB/s, {known.host}",
        "ram_gib": f"{known.ram_gib:g} GiB",
        "cpu_cores": str(known.cpu_cores),
        "power_watts": f"{known.power_watts} W",
    }
    if known.best_bf16_flops is not None:
        values["best_bf16_flops"] = f"{known.best_bf16_flops / 1e12:,.4g} TFLOPS"
    figures = [
        {"name": FIGURE_NAMES[name], "value": value, "sources": list(known.sources.get(name, ()))}
        for name, value in values.items()
    ]
    return {
        "name": known.name,
        "maker": known.maker,
        "memory": f"{known.ram_gib:g} GiB RAM",
        "note": known.note,
        "figures": figures,
    }


def gpu_memory_text(known: KnownMachine) -> str:
    """Returns the GPU memory of a known machine as text."""
    return "shared with RAM" if known.unified else f"{known.memory_mib / 1024:,.4g} GiB"


def free_memory_text(machine: Machine) -> str:
    """Returns the free RAM and GPU memory, for the head of a column."""
    card = f"{machine.gpus[0].free / GIB:,.0f} GiB GPU" if machine.gpus else "no GPU"
    return f"{machine.ram_available / GIB:,.0f} GiB RAM · {card}"


def free_then_text(machine: Machine) -> str:
    """Returns the memory with which the largest models were found, for a sentence."""
    card = f" and {machine.gpus[0].free / GIB:,.0f} GiB GPU memory" if machine.gpus else ""
    return f"{machine.ram_available / GIB:,.0f} GiB RAM{card}"


def cell_labels(found: Cell) -> dict[str, str]:
    """Returns the fit status as a word, with its tone, and the speed. Where the cell is about any
    optimizer, the word includes how the first that fits keeps its moments, as in "fits, bf16", and
    `ways` has what else its plan does to take less RAM, as in "GPU gradients, pairs".
    """
    tone, word = STATUS_LABELS[found.status]
    if found.any_optimizer and found.status != FitStatus.DOES_NOT_FIT:
        word = f"{word}, {OPTIMIZERS[found.optimizer].format}"
    savings = ", ".join(found.savings) if found.any_optimizer else ""
    return {"tone": tone, "word": word, "speed": rate_text(found), "ways": savings}


def rate_text(found: Cell) -> str:
    """Returns the tokens per second of a cell, or an empty text if unknown."""
    if found.tokens_per_second is None:
        return ""
    return f"{rounded_rate(found.tokens_per_second)} tokens/s"


def in_billions(count: int, whole: int) -> str:
    """Returns a count of parameters in billions, as in 7.62 billion; with those of the whole
    checkpoint where it has more, as in 7.62 of 8.29 billion.
    """
    of_whole = f" of {whole / 1e9:,.3g}" if whole > count else ""
    return f"{count / 1e9:,.3g}{of_whole} billion"


def rounded_rate(rate: float) -> str:
    """Returns a rate as a whole number with at most three digits that are not zero."""
    return f"{float(f'{rate:.3g}'):,.0f}"


def cell_detail(found: Cell) -> str:
    """Returns a few sentences about one cell."""
    takes = (
        f"Takes {in_bytes(found.host_bytes)} of RAM{and_gpu_memory(found)} at least, "
        f"{moments_text(found)}."
    )
    if found.missing:
        return f"{takes} Missing: {found.missing}."
    if found.tokens_per_second is not None:
        origin = "estimated from the specification" if found.estimated else "from measured rates"
        takes += f" {speed_text(found)}, {origin}."
    if found.step_seconds is not None:
        takes += f" A step takes about {in_seconds(found.step_seconds)}."
    return " ".join([takes, *(WAY_SENTENCES[saving] for saving in found.savings)])


def moments_text(found: Cell) -> str:
    """Returns how the moments of a cell are kept, as a text to follow what it takes."""
    return f"with {OPTIMIZERS[found.optimizer].states_text}"


def and_gpu_memory(found: Cell) -> str:
    """Returns the GPU memory that a cell needs, as a text to follow its RAM; the text is empty if
    no GPU computes.
    """
    return "" if found.gpu_bytes is None else f" and {in_bytes(found.gpu_bytes)} of GPU memory"
